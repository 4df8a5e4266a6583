"""Learners update the policy."""

from posttrain_core.learner.protocol import Demonstration, Learner

__all__ = ["Demonstration", "Learner"]
