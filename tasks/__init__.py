"""Prefect tasks, and what runs a stage without Prefect.

In this repository *task* always means a Prefect task; one item for the policy to solve is a *problem*.
"""
