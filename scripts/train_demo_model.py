# SPDX-License-Identifier: Apache-2.0
"""Trains the demonstration model on the source text of Python's standard library, exports and measures it.

    python scripts/train_demo_model.py prepare     --work-dir DIR                corpus and tokenizer
    python scripts/train_demo_model.py train       --work-dir DIR --minutes 83   main model
    python scripts/train_demo_model.py train-mtp   --work-dir DIR --minutes 10   multi-token-prediction layer
    python scripts/train_demo_model.py train-draft --work-dir DIR --minutes 4.5  draft model
    python scripts/train_demo_model.py export      --work-dir DIR                writes the model folder
    python scripts/train_demo_model.py evaluate    --work-dir DIR                measures it, writes the card
    python scripts/train_demo_model.py all         --work-dir DIR                everything above

Trainings save their state every few minutes, and the same command resumes them. Needs torch, tokenizers, safetensors
and numpy; transformers for the check in `export`, matplotlib for the card's picture.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

DEFAULT_MODEL_DIR = Path(__file__).parent.parent / "fastdeploy" / "assets" / "demo_model"
DEFAULT_MINUTES = {"train": 83.0, "train-mtp": 10.0, "train-draft": 4.5}


def run_prepare(arguments: argparse.Namespace) -> None:
    """Reads the corpus and trains the tokenizer."""
    from demo_model.data import prepare

    prepare(arguments.work_dir, arguments.pin)


def minutes_of(arguments: argparse.Namespace, command: str) -> float:
    """Returns the time budget given for `command`, or its default."""
    given = arguments.minutes if arguments.command == command else None
    return DEFAULT_MINUTES[command] if given is None else given


def run_train(arguments: argparse.Namespace) -> None:
    """Trains the main model."""
    from demo_model.trunk import train_trunk

    train_trunk(arguments.work_dir, minutes_of(arguments, "train"), arguments.workers)


def run_train_mtp(arguments: argparse.Namespace) -> None:
    """Trains the MTP layer."""
    from demo_model.mtp import DistillationPlan, train_mtp

    plan = DistillationPlan(arguments.rows, arguments.rows // 2)
    train_mtp(arguments.work_dir, minutes_of(arguments, "train-mtp"), arguments.workers, plan)


def run_train_draft(arguments: argparse.Namespace) -> None:
    """Trains the draft model."""
    from demo_model.mtp import DistillationPlan, train_draft

    plan = DistillationPlan(arguments.rows, arguments.rows // 2)
    train_draft(arguments.work_dir, minutes_of(arguments, "train-draft"), arguments.workers, plan)


def run_export(arguments: argparse.Namespace) -> None:
    """Writes the model folder and compares its logits with transformers'."""
    from demo_model.export import compare_with_transformers, write_checkpoint
    from demo_model.mtp import load_students, load_trunk

    mtp, draft = load_students(arguments.work_dir)
    write_checkpoint(arguments.model_dir, arguments.work_dir, load_trunk(arguments.work_dir), mtp)
    write_checkpoint(arguments.model_dir / "draft", arguments.work_dir, draft, None)
    for folder in (arguments.model_dir, arguments.model_dir / "draft"):
        print(f"{folder.name}: largest logit difference to transformers {compare_with_transformers(folder)}")


def run_evaluate(arguments: argparse.Namespace) -> None:
    """Measures the model folder, writes its card and prints one JSON line."""
    from demo_model.card import write_card
    from demo_model.evaluate import evaluate

    figures = evaluate(arguments.model_dir, arguments.work_dir)
    write_card(arguments.model_dir, arguments.work_dir, arguments.device_name)
    print(json.dumps(asdict(figures)))


COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "prepare": run_prepare,
    "train": run_train,
    "train-mtp": run_train_mtp,
    "train-draft": run_train_draft,
    "export": run_export,
    "evaluate": run_evaluate,
}


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=(*COMMANDS, "all"))
    parser.add_argument("--work-dir", type=Path, required=True, help="token arrays, training states and logs")
    parser.add_argument("--model-dir", type=Path, default=DEFAULT_MODEL_DIR, help="the exported checkpoint")
    parser.add_argument("--minutes", type=float, help="time budget of one training, over all its sessions")
    parser.add_argument("--workers", type=int, default=2, help="CPU processes that compute gradients")
    parser.add_argument(
        "--rows", type=int, default=640, help="generated rows to distil from, and half as many real ones"
    )
    parser.add_argument("--pin", action="store_true", help="prepare: rewrite the hash list of the corpus")
    parser.add_argument("--device-name", default="two CPU cores", help="evaluate: named in the card")
    return parser.parse_args()


def main() -> None:
    """Runs one command, or all of them in order."""
    arguments = parse_arguments()
    for name in COMMANDS if arguments.command == "all" else (arguments.command,):
        COMMANDS[name](arguments)


if __name__ == "__main__":
    main()
