"""Several runs beside each other: groups that differ by their seeds, and the tables of them.

Values of two groups that belong to the same seed are compared in pairs, which takes out what the
seed has in common. Where seeds are the unit, a mean over fewer than three has no interval, and each
value is shown instead.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean

from flatlab.numbers import counted, plus_minus, standard_error, value_text
from flatlab.view.columns import FEW_SEEDS, aligned, legend
from flatlab.view.reader import RunData
from flatlab.view.results import (
    cell,
    ends,
    found,
    mean_or_each,
    notes,
    result_of,
    scale,
    value_columns,
)

# ------------------------------------------------------------------ groups


@dataclass
class RunGroup:
    """Runs that differ by their seeds only."""

    settings: dict[str, str] = field(default_factory=dict)  # see settings_of()
    runs: list[RunData] = field(default_factory=list)
    own: dict[str, str] = field(default_factory=dict)  # settings that most groups do not have

    @cached_property
    def results(self) -> list[dict]:
        """The result of each run, see result_of()."""
        return [result_of(run) for run in self.runs]

    @property
    def seeds(self) -> list:
        return [run.config.get("seed") for run in self.runs]

    @property
    def label(self) -> str:
        """The name of its run; of several 'titanic-none (seeds 0, 1)', or all names."""
        names = [run.name for run in self.runs]
        if len(names) == 1:
            return names[0]
        common = {name.removesuffix(f"-{seed}") for name, seed in zip(names, self.seeds)}
        return f"{' + '.join(sorted(common))} (seeds {str(self.seeds)[1:-1]})"

    @property
    def differs(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.own.items() if value)

    @property
    def value(self) -> float:
        return fmean(found(self.results, "value_mean") or [-math.inf])


def groups_of(runs: list[RunData]) -> dict[tuple[str, str], list[RunGroup]]:
    """(kind, task) -> groups of runs that differ by their seed only, for each table.

    A group has one run of each seed; further ones are another group. Runs of one folder are kept
    together.
    """
    compared = {}
    for run in sorted(runs, key=lambda run: (run.dir.parent, run.name)):
        groups = compared.setdefault((run.kind, run.task), [])
        settings, seed = settings_of(run), run.config.get("seed")
        same = [g for g in groups if g.settings == settings and seed not in g.seeds]
        if not same:
            same = [RunGroup(settings)]
            groups += same
        same[-1].runs.append(run)
    for groups in compared.values():
        frequency = Counter(pair for group in groups for pair in group.settings.items())
        for group in groups:
            pairs = group.settings.items()
            group.own = {
                key: value for key, value in pairs if frequency[key, value] <= len(groups) / 2
            }
    return compared


def settings_of(run: RunData) -> dict[str, str]:
    """All that makes a run besides its seed: setting -> text; 'my.yaml@1a2b3c' with a digest.

    Paths and names without a digest are whole: 'openai/model' is another one than 'local/model'.
    """
    texts = {}
    for key, value in run.config.items():
        if key not in ("seed", "name", "url"):
            whole = "+".join(map(str, value)) if isinstance(value, list) else str(value)
            texts[key] = value_text(value) if run.fingerprint.get(key) else whole
    for part, digest in run.fingerprint.items():
        if digest:
            texts[part] = f"{texts.get(part, '')}@{digest[-1] if part == 'code' else digest:.6}"
    return texts


# ------------------------------------------------------------------ tables


def table(runs: list[RunData]) -> str:
    """Text of `python viz.py logs/*`: what the columns mean, then for each kind of run and task a
    table and the answer.
    """
    parts, shown = [], []
    for heading, sentences, tables in comparisons(runs):
        parts.append(heading)
        if tables:
            shown.append(tables["Difference"])
            parts.append(aligned(shown[-1]))
        parts.append("\n".join(sentences))
    return "\n\n".join([legend(*shown), *parts, *notes(runs)])


def comparisons(runs: list[RunData]) -> list[tuple[str, list[str], dict[str, list[dict]]]]:
    """For each kind of run and task a heading, the answer and sentences about failures, and the
    tables: title -> rows.
    """
    compared = []
    for (kind, task), groups in groups_of(runs).items():
        sentences, tables = ["An imitation has no value: evaluate its adapter to compare it."], {}
        if kind != "imitation":
            ranked = sorted(groups, key=lambda group: group.value, reverse=True)
            sentences = [
                untrained(ranked[:2]) + answer(ranked),
                *(f"{group.label}: {ends(group.runs)}" for group in ranked),
                scale(groups[0].runs[0], {}),
            ]
            tables = {
                "Difference": difference_rows(ranked),
                "Each run": [
                    result_row(RunGroup(runs=[run])) for group in ranked for run in group.runs
                ],
            }
        compared.append((f"{task}, {kind}", sentences, tables))
    return compared


def answer(ranked: list[RunGroup]) -> str:
    """The comparison of the best group of runs with the next one in a sentence."""
    best, *others = ranked
    if not others:
        seeds = counted(len(best.runs), "run")
        return f"{seeds} of one setting, value {cell(best.results, 'value_mean', '+')}."
    names = [group.label + f" [{group.differs}]" * bool(group.own) for group in ranked[:2]]
    both = " and ".join(names)
    pairs = paired(best, others[0])
    if len(pairs) < FEW_SEEDS:
        values = " and ".join(plus_minus(group.value, None, "+") for group in ranked[:2])
        few = f"{counted(len(pairs), 'paired seed')}: too few for an interval"
        return f"{both} have the values {values}; {few}."
    low, high = t_interval(pairs)
    verdict = f"{both} do not differ"
    if low > 0:
        verdict = f"{names[0]} is better than {names[1]}"
    elif high < 0:
        verdict = f"On the common seeds {names[0]} is worse than {names[1]}"
    return (
        f"{verdict}: {mean_or_each(pairs)}, 95 % interval {low:+.4f} to {high:+.4f}, "
        f"{len(pairs)} paired seeds."
    )


def untrained(groups: list[RunGroup]) -> str:
    """A sentence about the runs whose best adapter is the untrained one, with the values of their
    last adapters.
    """
    parts = []
    for group in groups:
        if last := found(group.results, "last_mean"):
            parts.append(
                f"{len(last)} of {counted(len(group.runs), 'run')} of {group.label} (last adapter, "
                f"{group.runs[0].result['split']} part: {mean_or_each(last)})"
            )
    end = "their best adapter is the untrained one, which says nothing about the training"
    return f"Nothing was gained in {' and '.join(parts)}: {end}. " if parts else ""


def t_interval(values: list[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of these values by Student's t."""
    from scipy.stats import t

    half = t.ppf(0.975, len(values) - 1) * standard_error(values)
    return fmean(values) - half, fmean(values) + half


def difference_rows(ranked: list[RunGroup]) -> list[dict]:
    """A row per group of the same kind and task, with its difference to the first one."""
    best = ranked[0]
    return [
        {"run": group.label, "runs": len(group.runs)}
        | difference_columns(group, best)
        | result_row(group)
        for group in ranked
    ]


def result_row(group: RunGroup) -> dict:
    results = group.results
    what, *_ = results[0]["what"].split(" (")  # without its step or its id
    return {
        "run": group.label,
        **value_columns(results, "score"),
        "measured on": f"{what}, {results[0]['part']} part",
        "gain over untrained": cell(results, "difference", "+"),
        "last adapter": cell(results, "last_mean", "+"),
        "status": ", ".join(dict.fromkeys(run.status for run in group.runs)),
        "differs in": group.differs,
    }


def difference_columns(group: RunGroup, best: RunGroup) -> dict:
    """Columns about the difference of the values to those of the best group."""
    facts = dict.fromkeys(("difference", "95 % interval", "pairs"), "-")
    if group is best:
        return facts
    pairs = paired(group, best)
    facts |= {"difference": mean_or_each(pairs), "pairs": len(pairs)}
    if len(pairs) >= FEW_SEEDS:
        low, high = t_interval(pairs)
        facts["95 % interval"] = f"{low:+.4f} to {high:+.4f}"
    return facts


def paired(group: RunGroup, other: RunGroup) -> list[float]:
    """The differences of the values, for the seeds that both have."""
    values, others = values_of(group), values_of(other)
    return [values[seed] - others[seed] for seed in values if seed in others]


def values_of(group: RunGroup) -> dict:
    """The values by seed of one run, or of several the mean of each."""
    if len(group.runs) == 1:
        return group.results[0]["values"]
    seeds = zip(group.seeds, group.results)
    return {seed: result["value_mean"] for seed, result in seeds if result["values"]}
