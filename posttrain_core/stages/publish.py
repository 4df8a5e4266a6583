"""publish: consolidated weights as the next policy version, with probe tokens that prove which version is held."""

import tempfile
from pathlib import Path
from typing import Any

from posttrain_core import layout
from posttrain_core.errors import LearnerFault
from posttrain_core.layout import Scope
from posttrain_core.manifest import Manifest, commit_folder
from posttrain_core.records import Sample
from posttrain_core.stages.context import Run, new_attempt
from posttrain_core.stages.session import LearnerSession, read_samples

_PROBES = 2
_PROBE_TOKENS = 64


def publish(run: Run, scope: Scope, session: LearnerSession) -> Manifest:
    """Commit policy version `scope.iteration + 1`."""
    update = run.manifest(scope, "update")
    expected = run.fingerprint({"update": update.digest}, "model")
    found = run.find(scope, "publish", expected)
    if found is not None:
        return found
    version = scope.iteration + 1
    prefix = layout.policy(run.name, version, new_attempt())
    with run.timed(scope, "publish"), tempfile.TemporaryDirectory(dir=run.scratch) as folder:
        try:
            session.bring_to(version)
            session.learner.export_policy(Path(folder))
            probes = [_probe(session, sample) for sample in read_samples(run, update)[:_PROBES]]
        except LearnerFault as error:
            session.forget()
            run.progress.note(f"{scope}: the learner failed and is brought up again from the store: {error}"[:300])
            raise
        refs = commit_folder(run.store, prefix, Path(folder), semantic=True)
    notes = {"prefix": prefix, "probes": probes}
    return run.commit(scope, "publish", expected, refs, notes=notes)


def _probe(session: LearnerSession, sample: Sample) -> dict[str, Any]:
    start = sample.loss_mask.index(1)
    return session.probe(sample.input_ids[:start], sample.input_ids[start : start + _PROBE_TOKENS])
