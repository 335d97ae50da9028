"""Shared parts of vision-language-action policies: sampling chains, records, tokens and adapters."""
