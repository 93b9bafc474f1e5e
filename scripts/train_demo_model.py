# SPDX-License-Identifier: Apache-2.0
"""Trains the demonstration model on the source text of Python's standard library, exports and measures it.

    python scripts/train_demo_model.py prepare     --work-dir DIR                corpus and tokenizer
    python scripts/train_demo_model.py train       --work-dir DIR --minutes 83   main model
    python scripts/train_demo_model.py train-moe   --work-dir DIR --steps N      main model with experts
    python scripts/train_demo_model.py train-mtp   --work-dir DIR --minutes 10   multi-token-prediction layer
    python scripts/train_demo_model.py train-draft --work-dir DIR --minutes 4.5  draft model
    python scripts/train_demo_model.py train-heads --work-dir DIR --steps 1300   draft heads, written and measured
    python scripts/train_demo_model.py export      --work-dir DIR                writes the model folder
    python scripts/train_demo_model.py evaluate    --work-dir DIR                measures it, writes the card
    python scripts/train_demo_model.py all         --work-dir DIR                everything above but the heads

`train-mtp`, `export`, `evaluate` and `all` work on the dense model, or with `--model moe` on the one with experts,
which has no draft model. `train-heads` needs only the exported dense model and the files of `prepare`; `--heads`
chooses among eagle, eagle3, mlp and medusa. Trainings save their state every few minutes, and the same command resumes
them. A budget in steps instead of minutes gives the same training on a machine that other work slows down. Needs torch,
tokenizers, safetensors and numpy; transformers for the check in `export`, matplotlib for the card's picture.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from demo_model.trunk import Budget, Variant

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

DEMO_MODEL = Path(__file__).parent.parent / "fastdeploy" / "assets" / "demo_model"
MODEL_DIRS = {"dense": DEMO_MODEL, "moe": DEMO_MODEL / "moe"}
DEFAULT_MINUTES = {"train": 83.0, "train-mtp": 10.0, "train-draft": 4.5}
DEFAULT_STEPS = {"train-moe": 840, "train-mtp": 500, "train-heads": 1300}  # train-mtp: of the model with experts
HEADS = ("eagle", "eagle3", "mlp", "medusa")


def run_prepare(arguments: argparse.Namespace) -> None:
    """Reads the corpus and trains the tokenizer."""
    from demo_model.data import prepare

    prepare(arguments.work_dir, arguments.pin)


def budget_of(arguments: argparse.Namespace, command: str) -> Budget:
    """Returns the budget given for `command`, or its default: minutes for the dense model, else steps."""
    from demo_model.trunk import Budget

    minutes, steps = (arguments.minutes, arguments.steps) if arguments.command == command else (None, None)
    if minutes is None and steps is None:
        if arguments.model == "moe" or command not in DEFAULT_MINUTES:
            steps = DEFAULT_STEPS[command]
        else:
            minutes = DEFAULT_MINUTES[command]
    return Budget((minutes or 0.0) * 60, steps)


def variant_of(arguments: argparse.Namespace) -> Variant:
    """Returns the main model that the command works on."""
    from demo_model.trunk import DENSE, MOE

    return MOE if arguments.model == "moe" else DENSE


def run_train(arguments: argparse.Namespace) -> None:
    """Trains the main model."""
    from demo_model.trunk import DENSE, train_trunk

    train_trunk(arguments.work_dir, budget_of(arguments, "train"), arguments.workers, DENSE)


def run_train_moe(arguments: argparse.Namespace) -> None:
    """Trains the main model with experts."""
    from demo_model.trunk import MOE, train_trunk

    train_trunk(arguments.work_dir, budget_of(arguments, "train-moe"), arguments.workers, MOE)


def run_train_mtp(arguments: argparse.Namespace) -> None:
    """Trains the MTP layer."""
    from demo_model.mtp import DistillationPlan, train_mtp

    plan, budget = DistillationPlan(arguments.rows, arguments.rows // 2), budget_of(arguments, "train-mtp")
    train_mtp(arguments.work_dir, budget, arguments.workers, plan, variant_of(arguments))


def run_train_draft(arguments: argparse.Namespace) -> None:
    """Trains the draft model."""
    from demo_model.mtp import DistillationPlan, train_draft

    plan = DistillationPlan(arguments.rows, arguments.rows // 2)
    train_draft(arguments.work_dir, budget_of(arguments, "train-draft"), arguments.workers, plan)


def run_train_heads(arguments: argparse.Namespace) -> None:
    """Trains draft heads of the dense model, writes them beside it and prints one JSON line of figures."""
    from demo_model.heads_card import write_head_card
    from demo_model.heads_evaluate import evaluate_heads
    from demo_model.heads_export import write_head
    from demo_model.heads_training import load_head, train_head
    from demo_model.model import ModelShape
    from demo_model.mtp import DistillationPlan

    plan, budget = DistillationPlan(arguments.rows, arguments.rows // 2), budget_of(arguments, "train-heads")
    heads, shape = {}, ModelShape()
    for name in arguments.heads:
        train_head(name, arguments.model_dir, arguments.work_dir, budget, arguments.workers, plan)
        heads[name] = load_head(name, arguments.work_dir, shape)
        write_head(name, heads[name], shape, arguments.model_dir / name)
    figures = evaluate_heads(heads, arguments.model_dir)
    for name, head in heads.items():
        write_head_card(name, head, figures[name], arguments.work_dir, arguments.model_dir / name)
    print(json.dumps({name: asdict(figure) for name, figure in figures.items()}))


def run_export(arguments: argparse.Namespace) -> None:
    """Writes the model folder and compares its logits with transformers'."""
    from demo_model.export import compare_with_transformers, write_checkpoint
    from demo_model.mtp import load_draft, load_mtp, load_trunk

    variant, work_dir, folders = variant_of(arguments), arguments.work_dir, [arguments.model_dir]
    write_checkpoint(folders[0], work_dir, load_trunk(work_dir, variant), load_mtp(work_dir, variant))
    if arguments.model == "dense":
        folders.append(arguments.model_dir / "draft")
        write_checkpoint(folders[1], work_dir, load_draft(work_dir), None)
    for folder in folders:
        print(f"{folder.name}: largest logit difference to transformers {compare_with_transformers(folder)}")


def run_evaluate(arguments: argparse.Namespace) -> None:
    """Measures the model folder, writes its card and prints one JSON line."""
    from demo_model.card import write_card
    from demo_model.evaluate import evaluate

    figures = evaluate(arguments.model_dir, arguments.work_dir)
    write_card(arguments.model_dir, arguments.work_dir, figures, arguments.device_name)
    print(json.dumps(asdict(figures)))


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "prepare": run_prepare,
    "train": run_train,
    "train-moe": run_train_moe,
    "train-mtp": run_train_mtp,
    "train-draft": run_train_draft,
    "train-heads": run_train_heads,
    "export": run_export,
    "evaluate": run_evaluate,
}
ALL = {
    "dense": ("prepare", "train", "train-mtp", "train-draft", "export", "evaluate"),
    "moe": ("prepare", "train-moe", "train-mtp", "export", "evaluate"),
}


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=(*COMMANDS, "all"))
    parser.add_argument("--model", choices=tuple(MODEL_DIRS), help="the main model; train and train-moe imply theirs")
    parser.add_argument("--work-dir", type=Path, required=True, help="token arrays, training states and logs")
    parser.add_argument("--model-dir", type=Path, help="the exported checkpoint; default: the one in the package")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--minutes", type=float, help="time budget of one training, over all its sessions")
    budget.add_argument("--steps", type=int, help="budget of one training in batches, over all its sessions")
    parser.add_argument("--workers", type=int, default=2, help="CPU processes that compute gradients")
    parser.add_argument(
        "--rows", type=int, default=640, help="generated rows to distil from, and half as many real ones"
    )
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=HEADS, help="train-heads: the heads to train")
    parser.add_argument("--pin", action="store_true", help="prepare: rewrite the hash list of the corpus")
    parser.add_argument("--device-name", default="two CPU cores", help="evaluate: named in the card")
    arguments = parser.parse_args()
    implied = {"train": "dense", "train-draft": "dense", "train-heads": "dense", "train-moe": "moe"}.get(
        arguments.command
    )
    if implied is not None and arguments.model not in (None, implied):
        parser.error(f"{arguments.command} trains the {implied} model")
    arguments.model = implied or arguments.model or "dense"
    arguments.model_dir = arguments.model_dir or MODEL_DIRS[arguments.model]
    return arguments


def main() -> None:
    """Runs one command, or all of them in order."""
    arguments = parse_arguments()
    for name in ALL[arguments.model] if arguments.command == "all" else (arguments.command,):
        COMMANDS[name](arguments)


if __name__ == "__main__":
    main()
