"""taut train: from text to a trained model: data, tokeniser, training, model folder, report."""

import argparse
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("settings", nargs="*", help="a recipe.toml, and section.key=value")
    parser.add_argument("--dry-run", action="store_true", help="say what would happen, and stop")


def run(args: argparse.Namespace) -> int:
    from taut.config import read_config
    from taut.train.loop import Run
    from taut.train.report import write_report

    recipes = [word for word in args.settings if "=" not in word]
    if len(recipes) > 1:
        raise ValueError(f"one recipe at a time; got {', '.join(recipes)}")
    recipe = recipes[0] if recipes else None
    config = read_config(recipe, [word for word in args.settings if "=" in word])
    display = Display()
    run = Run(config, display)
    display.describe(run)
    if args.dry_run:
        return 0
    ended = 0
    try:
        run.train()
    except KeyboardInterrupt:
        display.say("interrupted: the model as it is now is kept")
        ended = 130
    page = write_report([run.out], run.out / "report.html")
    display.say(f"model   {run.out / 'model'}   (taut.load, or transformers' from_pretrained)")
    display.say(f"report  {page}")
    return ended


class Display:
    """A bar and a line for each evaluation on a terminal; plain lines elsewhere."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.console = Console(highlight=False)
        self.progress: Any = None
        if self.console.is_terminal and self.console.width >= 60:
            columns = (
                BarColumn(bar_width=20),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
            )
            self.progress = Progress(*columns, console=self.console)
        self.task: Any = None
        self.last_stage = ""

    def say(self, line: str) -> None:
        if self.task is not None:
            self.progress.stop()
            self.task = None
        self.console.print(line, soft_wrap=True)

    def stage(self, name: str, count: int) -> None:
        if name != self.last_stage:
            self.last_stage = name
            self.console.print(f"{name} ..")

    def describe(self, run: Any) -> None:
        config, lengths = run.config, run.corpus.lengths
        count, tokens = run.model.param_count(), int(lengths.sum())
        steps = len(run.sampler)
        for line in (
            f"data    {config.data.source}: {len(lengths):,} texts, {tokens:,} tokens, "
            f"{run.corpus.vocab_size:,} words, longest {int(lengths.max())}",
            f"model   {config.model.kind}, {count / 1e6:.1f} M parameters, "
            f"{str(run.dtype).removeprefix('torch.')}",
            f"train   {config.train.steps} steps of "
            f"{config.train.budget_tokens * config.train.accumulate:,} tokens, "
            f"{max(steps // config.train.accumulate, 1)} an epoch; into {Path(config.train.out)}",
        ):
            self.say(line)

    def step(self, step: int, steps: int, metrics: dict[str, float]) -> None:
        text = (
            f"loss {metrics['loss']:.3f}  {metrics['tokens_per_s']:,.0f} tokens/s  "
            f"padding avoided {metrics['padding_avoided']:.0%}"
        )
        if self.progress is None:
            self.console.print(f"step {step}/{steps}  {text}", soft_wrap=True)
            return
        if self.task is None:
            self.progress.start()
            self.task = self.progress.add_task(text, total=steps)
        self.progress.update(self.task, completed=step, description=text)
        if step == steps:
            self.progress.stop()

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        text = f"held-out loss {metrics['loss']:.3f}, accuracy {metrics['accuracy']:.1%}"
        self.console.print(f"step {step}  {text}", soft_wrap=True)
