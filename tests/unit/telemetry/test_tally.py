"""Counts that are read when metrics are collected."""

from __future__ import annotations

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint, Sum

from pdbus.telemetry import Tally


def test_counts_are_totals_by_attribute_and_only_grow(monkeypatch: pytest.MonkeyPatch):
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    tally = Tally("answers", "{answer}", "Answers by outcome", "outcome")

    def counts() -> dict[object, float]:
        found = reader.get_metrics_data()
        points = []
        for metric in found.resource_metrics[0].scope_metrics[0].metrics if found else ():
            assert metric.name == "answers"
            assert isinstance(metric.data, Sum)
            assert metric.data.is_monotonic
            points += [point for point in metric.data.data_points if isinstance(point, NumberDataPoint)]
        return {(point.attributes or {})["outcome"]: point.value for point in points}

    for outcome in ("whole", "whole", "failed"):
        tally.add(outcome)
    assert counts() == {"whole": 2, "failed": 1}
    tally.add("whole")
    assert counts() == {"whole": 3, "failed": 1}
    provider.shutdown()
