"""Actor and verifier with long-tailed episodes: our services beside a synchronous, trainer-centred loop."""
