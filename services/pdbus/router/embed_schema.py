"""Bodies of /v1/embeddings -> one `EmbeddingRequest`. Pure: no model, no clock."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pdbus.errors import InvalidRequest
from pdbus.router.openai_body import EmbeddingBody
from pdbus.router.openai_reasons import explain
from pdbus.router.openai_schema import Prompt, prompts_of

MAX_INPUTS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """A validated request."""

    model: str
    """Without `@ref`."""
    ref: str | None
    inputs: tuple[Prompt, ...]
    """Texts, or token ids that are taken as they are."""
    base64: bool = False
    dimensions: int | None = None
    user: str | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        """Raises InvalidRequest for inputs that no model takes."""
        if not self.inputs:
            raise InvalidRequest("there is no input", param="input")
        if len(self.inputs) > MAX_INPUTS:
            raise InvalidRequest(f"{len(self.inputs)} inputs are more than {MAX_INPUTS}", param="input")
        if not all(self.inputs):
            raise InvalidRequest("an input is empty", param="input")


def parse_embedding(body: bytes) -> EmbeddingRequest:
    """Raises InvalidRequest that names the field, in the caller's terms."""
    try:
        parsed = msgspec.json.decode(body, type=EmbeddingBody)
    except msgspec.ValidationError as error:
        raise explain(str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    name, at, ref = parsed.model.partition("@")
    return EmbeddingRequest(
        model=name,
        ref=ref if at else None,
        inputs=prompts_of(parsed.input, "input"),
        base64=parsed.encoding_format == "base64",
        dimensions=parsed.dimensions,
        user=parsed.user,
        timeout_s=parsed.timeout,
    )
