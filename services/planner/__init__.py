"""The planner: moves workers between prefill and decode so that both latency targets are kept."""
