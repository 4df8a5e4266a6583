"""posttrain_core: the pipeline without its scheduler. Never imports Prefect."""
