"""The command `posttrain`: a composition root. What it shows of a run comes from `posttrain_core.inspect`."""
