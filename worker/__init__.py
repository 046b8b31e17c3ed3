"""One process per GPU: takes jobs, runs them in one continuous batch, publishes every token."""
