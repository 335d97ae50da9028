"""Sampling chains, records, tokens and adapters that vision-language-action policies share."""
