"""`RunConfig`: the YAML file, the Prefect flow parameter and the CLI's `--set a.b=c` at once.

Each field is *semantic* (part of the fingerprint of what depends on it: a change on resume is refused) or
*operational* (free to change on resume). Defaults are the vetted run. Unknown keys are errors.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"


def semantic(default: Any, doc: str, **bounds: Any) -> Any:
    """A field whose value the results depend on."""
    return Field(default, description=doc, json_schema_extra={"semantic": True}, **bounds)


def operational(default: Any, doc: str, **bounds: Any) -> Any:
    """A field that changes where, when or how fast, never what."""
    return Field(default, description=doc, json_schema_extra={"semantic": False}, **bounds)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


# --- policy -----------------------------------------------------------------------------------------------------


class ModelConfig(Section):
    """The starting policy."""

    path: str = operational(
        "", "Folder of a Hugging Face causal LM with tokenizer and chat template, or a hub id; its contents count."
    )
    dtype: Literal["float32", "bfloat16"] = semantic("float32", "Precision of the learner's and sampler's weights.")


class SftConfig(Section):
    """Supervised warm start before the first iteration."""

    num_demonstrations: int = semantic(4000, "Examples drawn from the domains, by weight.", ge=1)
    epochs: int = semantic(1, "Passes over the examples.", ge=1)
    learning_rate: float = semantic(1e-3, "Peak of the linear warm-up and cosine decay.", gt=0)
    batch_size: int = semantic(64, "Examples a step, over all ranks.", ge=1)
    warmup_steps: int = semantic(20, "Steps of linear warm-up.", ge=0)
    weight_decay: float = semantic(0.0, "AdamW weight decay.", ge=0)


# --- domains ----------------------------------------------------------------------------------------------------


class DomainSection(Section):
    """What every domain can be told."""

    weight: float = semantic(1.0, "Share of the training problems, relative to the other domains.", gt=0)
    max_new_tokens: int | None = semantic(None, "Response tokens at most. Default: plan.max_new_tokens.", ge=1)
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = semantic(
        (), "A rollout ends when its text holds one of these strings.", max_length=16
    )


class ProgramDomainConfig(DomainSection):
    """Programming by example: write a Python expression for an integer function."""

    type: Literal["program"] = "program"
    instruction: str = semantic(
        "Each pair is x:f(x) for an integer function f. Answer with a Python expression in x, and nothing else.\n",
        "Put before the examples. A policy warm-started on the bare examples needs none.",
    )
    demonstration_quality: float = semantic(
        0.5, "Share of right answers among the warm start's demonstrations.", ge=0, le=1
    )


class ReasoningGymDomainConfig(DomainSection):
    """A generator of the reasoning-gym package, by name."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    generator: str = semantic(..., "Name of the generator, such as basic_arithmetic.")
    options: dict[str, Any] = semantic({}, "Arguments of the generator.")
    num_problems: int = semantic(2000, "Problems generated and split into training and held-out ones.", ge=10)
    score_timeout_seconds: float = semantic(5.0, "Limit of one call of the package's scorer.", gt=0)
    min_score: float = semantic(
        1.0, "A score below it is reward 0: the usual scorer pays part for a wrong answer that contains the right one."
    )
    demonstration_quality: float = semantic(
        0.5, "Share of right answers among the warm start's demonstrations.", ge=0, le=1
    )


DomainConfig = Annotated[ProgramDomainConfig | ReasoningGymDomainConfig, Field(discriminator="type")]


# --- plan and evaluation ----------------------------------------------------------------------------------------


class RepetitionConfig(Section):
    """A rollout is hopeless, and cut, when its last `num_tokens` tokens repeat a period of at most `max_period`."""

    num_tokens: int = semantic(256, "Tokens that repeat.", ge=4)
    max_period: int = semantic(64, "Longest period that is looked for, in tokens.", ge=1)

    @model_validator(mode="after")
    def _repeats(self) -> "RepetitionConfig":
        if self.num_tokens < 2 * self.max_period:
            raise ValueError(f"num_tokens {self.num_tokens} holds fewer than two periods of {self.max_period}")
        return self


class PlanConfig(Section):
    problems_per_iteration: int = semantic(16, "Problems (groups) in an iteration.", ge=1, le=100_000)
    group_size: int = semantic(8, "Rollouts of each problem.", ge=1, le=10_000)
    max_new_tokens: int = semantic(32, "Response tokens of a rollout at most.", ge=1, le=10_000_000)
    temperature: float = semantic(1.0, "Of the sampling distribution; the learner recomputes under the same.", gt=0)
    repetition: RepetitionConfig | None = semantic(
        RepetitionConfig(), "Cut rollouts that repeat themselves; null lets them run to their limit."
    )
    rollouts_per_shard: int = semantic(64, "Unit of fan-out and retry; a group is never split.", ge=1)
    min_scored_share: float = operational(0.5, "Below this share of scored rollouts an iteration stops.", ge=0, le=1)


class EvalConfig(Section):
    every: int = operational(10, "Evaluate each such number of iterations; first and last version always.", ge=1)
    num_problems: int = semantic(64, "Held-out problems, the same ones each time.", ge=1)
    samples_per_problem: int = semantic(4, "Rollouts of each held-out problem.", ge=1)
    temperature: float = semantic(1.0, "0 is greedy.", ge=0)


# --- engines ----------------------------------------------------------------------------------------------------


class InProcessSamplerConfig(Section):
    """transformers in this process: for small models and tests."""

    type: Literal["inprocess"] = "inprocess"
    device: str = operational("auto", "Torch device; auto is cuda where there is one, else cpu.")
    max_batch_size: int = semantic(128, "Sequences decoded together (part of bit-identity on CPU).", ge=1)
    num_threads: int = semantic(0, "CPU threads (part of bit-identity); 0 is all cores.", ge=0)


class ScriptedSamplerConfig(Section):
    """Answers from a fixed list: for tests. Learns which of them pays, with the numpy learner."""

    type: Literal["scripted"] = "scripted"
    responses: tuple[str, ...] = semantic(("x+1", "x+2", "x*x", "(", ""), "What it can answer.", min_length=1)


class VllmLaunchConfig(Section):
    """vLLM servers that a run starts, watches and stops itself, in an environment of their own (`make vllm`)."""

    python: str = operational("", "Interpreter of vLLM's environment. Default: .venv-vllm/bin/python of the checkout.")
    num_servers: int = operational(1, "Servers; the load is spread over them.", ge=1)
    devices: tuple[str, ...] = operational(
        (), "CUDA_VISIBLE_DEVICES of each server, such as ['0,1', '2,3']. Default: one GPU each, in order."
    )
    tensor_parallel_size: int = operational(1, "GPUs over which a server splits the model.", ge=1)
    max_num_seqs: int = operational(128, "Sequences that a server decodes together.", ge=1)
    gpu_memory_utilization: float = operational(0.9, "Share of a GPU's memory that a server takes.", gt=0, le=1)
    kv_cache_gib: float = operational(1.0, "Key/value cache of a server on CPU, GiB.", gt=0)
    threads: int = operational(0, "CPU threads of a server; 0 is cores / servers.", ge=0)
    sleep_while_training: bool = operational(
        False, "Give the GPU's memory back while the learner works, for learner and sampler on one GPU."
    )
    arguments: tuple[str, ...] = operational((), "Further arguments of vLLM's server.")
    stall_seconds: float = operational(600.0, "A start without a sign of progress for so long has failed.", gt=0)


class VllmSamplerConfig(Section):
    """vLLM servers over HTTP: those named by `url`, or else servers of the run's own (`launch`)."""

    type: Literal["vllm"] = "vllm"
    url: tuple[str, ...] = operational((), "Servers that run already, such as http://gpu1:8000 (see docs/vllm.md).")
    launch: VllmLaunchConfig | None = operational(None, "How to start servers. Default, without `url`: one server.")
    api_key_env: str = operational("VLLM_API_KEY", "Environment variable with the servers' API key, if they want one.")
    shared_folder: str = operational(
        "", "Where servers on other machines find weights: a folder on a file system that all of them mount."
    )
    requests_per_server: int = operational(256, "Requests that a server is given at once.", ge=1)
    stall_seconds: float = operational(60.0, "A server that gives no token to any request for so long is hung.", gt=0)
    probe_tolerance: float | None = operational(
        None, "Largest difference of a probe token's log-probability. Default: 0.005 in float32, 0.3 in bfloat16.", gt=0
    )

    @model_validator(mode="after")
    def _one_source(self) -> "VllmSamplerConfig":
        if self.url and self.launch is not None:
            raise ValueError("give url (servers that run already) or launch (servers to start), not both")
        return self


SamplerConfig = Annotated[
    InProcessSamplerConfig | VllmSamplerConfig | ScriptedSamplerConfig, Field(discriminator="type")
]


class EmbeddedSandboxConfig(Section):
    """Linux namespaces, no daemon, no root."""

    type: Literal["embedded"] = "embedded"
    workers: int = operational(2, "Executions at once.", ge=1)


class UnisolatedSandboxConfig(Section):
    """Plain processes. Model-written code then runs with your rights: for trusted policies only."""

    type: Literal["unisolated"] = "unisolated"
    i_understand_that_model_code_runs_with_my_rights: Literal[True] = operational(..., "Must be true.")
    workers: int = operational(2, "Executions at once.", ge=1)


SandboxConfig = Annotated[EmbeddedSandboxConfig | UnisolatedSandboxConfig, Field(discriminator="type")]


# --- learner ----------------------------------------------------------------------------------------------------


class AdvantageConfig(Section):
    baseline: Literal["group_mean", "leave_one_out", "batch_mean", "none"] = semantic(
        "group_mean", "What is subtracted from a reward. Masked rollouts take no part."
    )
    scale: Literal["group_std", "batch_std", "none"] = semantic("group_std", "What the difference is divided by.")


class KlConfig(Section):
    estimator: Literal["k1", "k2", "k3"] = semantic("k3", "Estimator of the divergence, per token.")
    coefficient: float = semantic(0.01, "Weight in the loss.", gt=0)


class ImportanceConfig(Section):
    """Correction for the difference between sampler and learner log-probabilities."""

    type: Literal["none", "truncated", "masked"] = semantic("truncated", "Cap the ratio, or drop tokens above it.")
    limit: float = semantic(2.0, "Cap (truncated) or upper bound (masked; the lower is its inverse).", gt=1)


class MismatchConfig(Section):
    """Limits of the difference between sampler and learner log-probabilities; an update beyond one stops the run."""

    max_mean_difference: float | None = operational(0.3, "Of the mean absolute difference of a token.", gt=0)
    max_kl: float | None = operational(0.2, "Of the estimated KL(sampler || learner) per token.", gt=0)
    min_ess_share: float | None = operational(
        0.1, "Of the effective sample size of the importance weights, as a share of the tokens.", gt=0, le=1
    )


class AlgorithmConfig(Section):
    """A preset names advantage, ratio, clipping and normalisation; each part can be set on its own."""

    preset: Literal["grpo", "dr_grpo", "dapo", "rloo", "reinforce", "gspo", "cispo"] = semantic(
        "grpo", "The published recipe to start from."
    )
    advantage: AdvantageConfig | None = semantic(None, "Default: the preset's.")
    clip_low: float | None = semantic(None, "1 - clip_low is the lower bound of the ratio. Default: the preset's.")
    clip_high: float | None = semantic(None, "1 + clip_high is the upper bound. Default: the preset's.")
    kl: KlConfig | None = semantic(None, "Divergence from the starting policy; none by default.")
    entropy_coefficient: float = semantic(0.0, "Bonus for entropy.", ge=0)
    importance: ImportanceConfig = semantic(ImportanceConfig(), "Sampler/learner correction.")
    mismatch: MismatchConfig = operational(MismatchConfig(), "When sampler and learner differ too much to go on.")
    truncated: Literal["zero", "mask"] = semantic(
        "zero", "Rollouts that a limit cut: learned from with their reward of 0, or left out."
    )
    overlong_buffer: int = semantic(
        0, "dapo: the last such tokens before max_new_tokens are penalised linearly; 0 is off.", ge=0
    )
    normalizer: int | None = semantic(None, "dr_grpo: the constant that token sums are divided by.", ge=1)


class NumpyLearnerConfig(Section):
    """Learns which scripted answer pays: for tests."""

    type: Literal["numpy"] = "numpy"
    learning_rate: float = semantic(0.5, "Step of plain policy gradient.", gt=0)


class LoraConfig(Section):
    """Low-rank adapters (Hu et al., arXiv 2106.09685): only they are trained; the rest of the policy is frozen."""

    rank: int = semantic(16, "Rank of the adapters.", ge=1)
    alpha: float = semantic(32.0, "The adapters' product is scaled by alpha / rank.", gt=0)
    target_modules: tuple[str, ...] = semantic((), "Names of the linear layers. Default: all but the output layer.")


class DeepSpeedLearnerConfig(Section):
    """DeepSpeed ZeRO. The operational settings say how the work is laid out over memory and machines: a run can go on
    with other ones, with results that differ by rounding only."""

    type: Literal["deepspeed"] = "deepspeed"
    num_ranks: int = operational(1, "Processes (GPUs), over all hosts.", ge=1)
    zero_stage: Literal[0, 1, 2, 3] = operational(1, "What ZeRO partitions over the ranks.")
    hostfile: str = operational(
        "", "DeepSpeed hostfile of several machines; its launcher then starts the ranks. Default: this machine."
    )
    threads_per_rank: int = operational(0, "CPU threads of a rank; 0 is cores / ranks.", ge=0)
    stall_seconds: float = operational(1800.0, "Ranks that report no progress for so long are hung.", gt=0)
    lora: LoraConfig | None = semantic(None, "Train adapters instead of all weights.")
    learning_rate: float = semantic(1e-4, "AdamW, constant after the warm-up.", gt=0)
    warmup_steps: int = semantic(0, "Optimizer steps of linear warm-up.", ge=0)
    weight_decay: float = semantic(0.0, "AdamW weight decay.", ge=0)
    adam_beta1: float = semantic(0.9, "AdamW.", ge=0, lt=1)
    adam_beta2: float = semantic(0.95, "AdamW.", ge=0, lt=1)
    max_grad_norm: float = semantic(1.0, "Gradient clipping.", gt=0)
    steps_per_iteration: int = semantic(1, "Optimizer steps: the iteration's samples are split into so many.", ge=1)
    epochs: int = semantic(1, "Passes over an iteration's samples.", ge=1)
    tokens_per_micro_batch: int = operational(8192, "Padded tokens of a forward pass on a rank at most.", ge=1)
    gradient_checkpointing: bool = operational(False, "Recompute activations to save memory.")
    offload_optimizer: bool = operational(False, "Keep the optimizer's state in CPU memory (ZeRO 1 to 3).")
    offload_parameters: bool = operational(False, "Keep the parameters in CPU memory while unused (ZeRO 3).")

    @model_validator(mode="after")
    def _offload_fits(self) -> "DeepSpeedLearnerConfig":
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer needs zero_stage 1, 2 or 3")
        if self.offload_parameters and self.zero_stage != 3:
            raise ValueError("offload_parameters needs zero_stage 3")
        return self


LearnerConfig = Annotated[NumpyLearnerConfig | DeepSpeedLearnerConfig, Field(discriminator="type")]


class CheckpointConfig(Section):
    every: int = operational(5, "Iterations between checkpoints; updates in between are replayed on recovery.", ge=1)
    keep_last: int = operational(2, "Newest checkpoints and policy versions that are kept.", ge=1)
    keep_every: int = operational(0, "Also keep those whose number is a multiple of this; 0 keeps no others.", ge=0)


class PrefectConfig(Section):
    max_workers: int = operational(4, "Tasks of an iteration at once.", ge=1)
    iterations_per_flow_run: int = operational(
        10,
        "Iterations that share a flow run: each costs about 0.15 s, and one with hundreds of tasks is slow to show.",
        ge=1,
    )
    retries: int = operational(2, "Of a task that met a retryable fault.", ge=0)
    timeout_seconds: float | None = operational(
        None, "Of a task. Marks it failed; what it runs stops at the next Python instruction. None: no limit.", gt=0
    )
    retry_delay_seconds: float = operational(1.0, "Before the first retry; doubles each time.", ge=0)


class StopConfig(Section):
    eval_pass_rate: float | None = operational(None, "Stop when the held-out pass rate reaches this.", gt=0, le=1)


class RunConfig(Section):
    run: str = operational("demo", "Name of the run.", pattern=_NAME)
    store: str = operational("runs", "Folder or s3://bucket/prefix under which runs are kept.", min_length=1)
    seed: int = semantic(0, "Every other seed derives from it.", ge=0, lt=2**31)
    iterations: int = operational(40, "Iterations in all; raise it and resume to go on.", ge=0)
    stop: StopConfig = operational(StopConfig(), "When to stop earlier.")
    model: ModelConfig = semantic(ModelConfig(), "The starting policy.")
    sft: SftConfig | None = semantic(None, "Supervised warm start; none by default.")
    domains: dict[Annotated[str, Field(pattern=_NAME)], DomainConfig] = semantic(
        ..., "The domains by name.", min_length=1
    )
    plan: PlanConfig = semantic(PlanConfig(), "What an iteration samples.")
    eval: EvalConfig = semantic(EvalConfig(), "Held-out evaluation.")
    sampler: SamplerConfig = semantic(InProcessSamplerConfig(), "What generates.")
    sandbox: SandboxConfig = semantic(EmbeddedSandboxConfig(), "What executes.")
    algorithm: AlgorithmConfig = semantic(AlgorithmConfig(), "How rewards become an update.")
    learner: LearnerConfig = semantic(DeepSpeedLearnerConfig(), "What updates.")
    checkpoint: CheckpointConfig = operational(CheckpointConfig(), "Resumable learner state.")
    prefect: PrefectConfig = operational(PrefectConfig(), "Scheduling.")

    @property
    def store_is_local(self) -> bool:
        return not self.store.startswith("s3://")

    @model_validator(mode="after")
    def _engines_fit(self) -> "RunConfig":
        if (self.sampler.type == "scripted") != (self.learner.type == "numpy"):
            raise ValueError(
                f"sampler.type {self.sampler.type!r} does not go with learner.type {self.learner.type!r}: "
                "scripted and numpy are for each other, inprocess and vllm go with deepspeed"
            )
        for name, temperature in (("plan", self.plan.temperature), ("eval", self.eval.temperature)):
            if self.sampler.type == "vllm" and temperature and not 0.01 <= temperature <= 2:
                raise ValueError(f"{name}.temperature is {temperature}: vLLM samples at 0.01 to 2 only")
        if self.sampler.type != "scripted" and not self.model.path:
            raise ValueError("model.path is empty: name a local Hugging Face model folder or a hub id")
        return self
