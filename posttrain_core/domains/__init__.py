"""Domains: kinds of work. A domain is one small class and one line in the registry below."""
