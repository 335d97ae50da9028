"""Code shared by vision-language-action policies: sampling chains, records, tokens and adapters."""
