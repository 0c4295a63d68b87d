"""Numbers of the running server, in Prometheus' text format at `/metrics`."""

from collections import defaultdict

_HELP = {
    "art_completions_total": ("counter", "Choices that finished."),
    "art_sampled_tokens_total": ("counter", "Tokens in those choices."),
    "art_steps_total": ("counter", "Training steps served."),
    "art_failed_steps_total": ("counter", "Training requests that ended in an error."),
    "art_step": ("gauge", "Newest served step of a model."),
    "art_train_seconds": ("gauge", "Duration of the last step."),
    "art_canary_logprob_difference": (
        "gauge",
        "Mean difference per token between engine and learner.",
    ),
    "art_retokenized_total": ("counter", "Trained choices whose text was tokenized again."),
    "art_exact_prompts_total": (
        "counter",
        "Trained choices with the prompt they were sampled from.",
    ),
    "art_rendered_prompts_total": ("counter", "Trained choices whose prompt was rendered again."),
    "art_ambiguous_choices_total": ("counter", "Choices left out because several prompts fit."),
}


class Metrics:
    """Counters and gauges by name and labels."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, float]] = defaultdict(dict)

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        values, key = self._values[name], _labels(labels)
        values[key] = values.get(key, 0) + amount

    def set(self, name: str, value: float, **labels: str) -> None:
        self._values[name][_labels(labels)] = value

    def render(self) -> str:
        lines = []
        for name, (kind, text) in _HELP.items():
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{labels} {value}" for labels, value in self._values[name].items()]
        return "\n".join(lines) + "\n"


def _labels(labels: dict[str, str]) -> str:
    pairs = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
    return f"{{{pairs}}}" if pairs else ""
