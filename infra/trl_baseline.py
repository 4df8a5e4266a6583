"""The arithmetic, model and settings of examples/bench.yaml under TRL's GRPOTrainer, for a comparison side by side.

    python3.11 -m venv .venv-trl && .venv-trl/bin/pip install torch==2.13.0
    .venv-trl/bin/pip install trl==1.16.0 transformers==5.24.0 reasoning-gym==0.1.25
    .venv/bin/python -m posttrain_core.learner.tiny MODEL --hidden-size 256 --num-layers 6 --num-heads 8
    .venv-trl/bin/python infra/trl_baseline.py MODEL

Prints JSON: seconds a step and rollouts a second, from the start of the third step to the end of the last.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import reasoning_gym
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

WARMUP = 2
OPTIONS = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 2,
    "operators": ["+"],
    "allow_parentheses": False,
    "allow_negation": False,
}


class Clock(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.marks.append(time.perf_counter())

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.marks.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    problems = reasoning_gym.create_dataset("basic_arithmetic", size=1000, seed=0, **OPTIONS)
    rows = [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in problems]

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [float(c[0]["content"].strip() == a) for c, a in zip(completions, answer, strict=True)]

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=128,
            num_generations=8,
            max_completion_length=8,
            max_steps=arguments.steps,
            learning_rate=3e-5,
            beta=0.0,
            temperature=1.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_steps=1000,
        )
        trainer = GRPOTrainer(
            model=str(arguments.model),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(rows),
            callbacks=[clock],
        )
        trainer.train()
    seconds = (clock.marks[-1] - clock.marks[WARMUP]) / (arguments.steps - WARMUP)
    print(json.dumps({"seconds_per_step": seconds, "rollouts_per_second": 128 / seconds}))


if __name__ == "__main__":
    main()
