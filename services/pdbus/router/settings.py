"""The router's settings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pdbus.settings import Settings, SettingsError


@dataclass(frozen=True, kw_only=True)
class RouterSettings(Settings):
    http_host: str = "127.0.0.1"
    http_port: int = 8000
    """0: any free one; the card's url tells."""
    http_cert: Path | None = None
    """A certificate chain: HTTP by TLS alone (1.2 and newer); with `http_key`. Absent: in the clear."""
    http_key: Path | None = None
    keys_file: Path | None = None
    """API keys, made by `pdbus keys add`; reread when it changes. Absent: no key is asked for."""
    max_inflight: int = 256
    """Choices that run at once."""
    max_queued: int = 512
    """Requests that may wait for their turn; more are refused with 429."""
    max_queued_bytes: int = 64 << 20
    """Of their bodies together."""
    max_body_bytes: int = 4 << 20
    result_ttl_s: float = 3600.0
    """How long a finished deterministic answer is kept."""
    feature_ttl_s: float = 6 * 3600.0
    """How long an embedding, or a feature of `feature_subject`, is kept."""
    feature_subject: str = ""
    """The NATS subject of a service of one's own, whose features are cached (`pd.v1.features.<model>`); empty: none."""

    tenant_disk_bytes: int = 512 << 20
    """What one tenant's jobs, results, batches and files may take of JetStream's disk, all together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.http_port <= 65535:
            raise SettingsError("PDBUS_HTTP_PORT must be a port, or 0 for any")
        if (self.http_cert is None) != (self.http_key is None):
            raise SettingsError("PDBUS_HTTP_CERT and PDBUS_HTTP_KEY go together")
        if self.max_inflight < 1 or self.max_queued < 0 or min(self.max_queued_bytes, self.max_body_bytes) < 1024:
            raise SettingsError(
                "PDBUS_MAX_INFLIGHT, PDBUS_MAX_QUEUED, PDBUS_MAX_QUEUED_BYTES or PDBUS_MAX_BODY_BYTES is too small"
            )
        if self.tenant_disk_bytes < 1 << 20:
            raise SettingsError("PDBUS_TENANT_DISK_BYTES must be 1 MiB at least")
        if self.result_ttl_s <= 0 or self.feature_ttl_s <= 0:
            raise SettingsError("PDBUS_RESULT_TTL_S and PDBUS_FEATURE_TTL_S must be above 0")
        if self.feature_subject and not re.fullmatch(r"(?!pd\.)[^\s.*>$]+(\.[^\s.*>]+)*", self.feature_subject):
            raise SettingsError("PDBUS_FEATURE_SUBJECT must be a subject of your own, without wildcards")
