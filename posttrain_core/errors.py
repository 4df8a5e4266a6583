"""Errors, named by the boundary that was crossed.

    PosttrainError
    |- ConfigError          a setting is unknown, missing, contradictory or of the wrong type
    |- RunConflict          another process holds the run, or the run was made with other settings
    |- StageIncomplete      a stage ended with too few scored rollouts to train on
    |- StoreError           the object store failed, persistently
    |  |- ObjectNotFound    no object at this key
    |  |- ObjectCorrupt     an object's bytes do not match the digest in the manifest that names it
    |  `- StoreFull         no space left; nothing half written
    |- SamplerUnavailable   the sampler cannot be started or does not answer
    |- SandboxUnavailable   model-written code cannot be isolated here
    |  `- SandboxFault      the sandbox failed by our fault: a canary program failed in it too
    |- VerifierFault        a verifier failed by its own fault (never the rollout's)
    |- LearnerFault         the learner processes failed
    `- PolicyMismatch       sampler and learner disagree about the policy by more than the configured limit

A bad rollout is a row (`records.Outcome`); an infrastructure fault is one of these exceptions, and the
Prefect task that meets it retries when `retryable` is true.
"""


class PosttrainError(Exception):
    """Base of all errors that this package raises on purpose; `exit_code` is what the CLI returns."""

    exit_code = 1
    retryable = False


class ConfigError(PosttrainError):
    exit_code = 2


class RunConflict(PosttrainError):
    exit_code = 3


class StageIncomplete(PosttrainError):
    exit_code = 4


class StoreError(PosttrainError):
    exit_code = 5
    retryable = True


class ObjectNotFound(StoreError):
    retryable = False


class ObjectCorrupt(StoreError):
    retryable = False


class StoreFull(StoreError):
    retryable = False


class SamplerUnavailable(PosttrainError):
    exit_code = 6
    retryable = True


class SandboxUnavailable(PosttrainError):
    exit_code = 7


class SandboxFault(SandboxUnavailable):
    retryable = True


class VerifierFault(PosttrainError):
    exit_code = 8
    retryable = True


class LearnerFault(PosttrainError):
    exit_code = 9
    retryable = True


class PolicyMismatch(PosttrainError):
    exit_code = 10
