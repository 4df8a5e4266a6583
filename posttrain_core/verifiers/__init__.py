"""Verifiers compare what was recorded with what was expected. None of them runs candidate bytes."""
