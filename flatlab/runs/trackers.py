"""The rows of a run, sent to TensorBoard or Weights & Biases as well. Optional, imported when asked for.

A sink is a function of (row, transcripts). Those in `run.sinks` get every row while it is made, see opened();
`python viz.py logs/<run> --tensorboard` sends those of a run that is there, with --watch also new ones.
"""

import os
import shutil
import time
from pathlib import Path

from flatlab.errors import UserError
from flatlab.runs.reader import RunData, number, transcripts

SHOWN = 8  # transcripts per row
open_sinks, sent = {}, {}  # by run directory; sent: rows that this process has sent


def place_of(row: dict) -> int:
    """The x axis: the step, or the order in which nodes were started."""
    return int(
        number(row.get("step"))
        if number(row.get("step")) is not None
        else number(row.get("order")) or 0
    )


def scalars(row: dict) -> dict[str, float]:
    return {
        key: value
        for key in row
        if key not in ("step", "order", "time")
        and not isinstance(row[key], bool)
        and (value := number(row[key])) is not None
    }


def talk(item: dict) -> str:
    """A transcript as plain text; of a row of journal.jsonl its actions."""
    turns = item.get("turns") if isinstance(item.get("turns"), list) else item.get("actions") or []
    return "\n".join(
        f"{turn.get('reply') or turn.get('action') or ''}\n> {turn.get('observation') or ''}"
        for turn in turns
    )


def score_of(item: dict) -> float | None:
    score = item.get("score")
    return number(score.get("value")) if isinstance(score, dict) else number(score)


def tensorboard(directory):
    """A sink that writes <directory>/tensorboard. Look at it with: tensorboard --logdir logs"""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise UserError(
            "--tensorboard needs a package that is not here: pip install tensorboard"
        ) from None
    writer = EventFileWriter(str(Path(directory) / "tensorboard"))

    def sink(row: dict, episodes=()):
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(row).items()]
        about = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        for count, item in enumerate(list(episodes)[:SHOWN]):
            indented = "".join(
                f"    {line}\n" for line in talk(item).split("\n")
            )  # Markdown shows it as it is
            text = f"score {score_of(item)}, {item.get('status')}\n\n{indented}"
            tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode(errors="replace")])
            values.append(Summary.Value(tag=f"transcripts/{count}", metadata=about, tensor=tensor))
        writer.add_event(
            Event(
                step=place_of(row),
                wall_time=number(row.get("time")) or time.time(),
                summary=Summary(value=values),
            )
        )
        writer.flush()

    return sink


def wandb(directory, config: dict, resume=True):
    """A sink that logs to Weights & Biases, transcripts as a table. WANDB_MODE=offline needs no account.

    resume: a second call for the same directory continues the same W&B run.
    """
    try:
        import wandb as client
    except ImportError:
        raise UserError("--wandb needs a package that is not here: pip install wandb") from None
    name = Path(directory).resolve().name
    run = client.init(
        project=os.environ.get("WANDB_PROJECT", "flatlab"),
        name=name,
        config=config,
        dir=str(directory),
        reinit="create_new",
        **({"id": name[:64], "resume": "allow"} if resume else {}),
    )
    run.define_metric("*", step_metric="step")  # nodes end in another order than they start

    def sink(row: dict, episodes=()):
        values = scalars(row) | {"step": place_of(row)}
        if episodes:
            cells = [
                [
                    place_of(row),
                    str(item.get("status")),
                    score_of(item),
                    talk(item).encode(errors="replace").decode(),
                ]
                for item in list(episodes)[:SHOWN]
            ]
            values["transcripts"] = client.Table(
                columns=["step", "status", "score", "transcript"], data=cells
            )
        run.log(values)

    sink.close = run.finish
    return sink


def opened(directory, config: dict, to_tensorboard: bool, to_wandb: bool, resume=True) -> list:
    """The sinks that were asked for: `run.sinks = sinks.opened(run.dir, run.config, cfg.tensorboard, cfg.wandb)`.

    Raises UserError, with the pip line, when a package is missing.
    """
    found = []
    if to_tensorboard:
        found.append(tensorboard(directory))
    if to_wandb:
        found.append(wandb(directory, config, resume))
    return found


def send(record: RunData, to_tensorboard: bool, to_wandb: bool):
    """Send the rows that this process has not sent yet. The first time replaces what an earlier export left."""
    if record.dir not in open_sinks:
        if to_tensorboard and not record.running:
            shutil.rmtree(record.dir / "tensorboard", ignore_errors=True)
        open_sinks[record.dir] = opened(
            record.dir, record.config, to_tensorboard, to_wandb, resume=False
        )
    for row in record.rows[sent.get(record.dir, 0) :]:
        items = [row] if record.kind == "search" else transcripts(record, row["step"])
        for sink in open_sinks[record.dir]:
            sink(row, items)
    sent[record.dir] = len(record.rows)
