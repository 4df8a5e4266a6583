"""Looking at runs: a catalogue that resolves through manifests, SQL, rollouts, reports and charts. Reads only."""

from posttrain_core.inspect.catalogue import Run, list_runs, open_run

__all__ = ["Run", "list_runs", "open_run"]
