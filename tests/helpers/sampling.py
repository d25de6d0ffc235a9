"""The sampling settings that engines are tried with."""

from __future__ import annotations

SAMPLING = {
    "greedy": {},
    "warm": {"temperature": 0.8},
    "hot": {"temperature": 1.3},
    "filtered": {"temperature": 1.0, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    "penalised": {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "greedy penalised": {"repetition_penalty": 1.5, "logit_bias": {5: 2.0, 7: -3.0}},
}
