# Thin on purpose: each target calls one script or one command. ARGS adds to its command line.

MODEL = .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf
NAME = SmolLM2-135M-Instruct
PYTEST = .venv/bin/python -m pytest

.PHONY: serve test test-slow check bench

serve: ## Serve the demo model: make serve ARGS="--port 8123"
	@scripts/bootstrap.sh serve
	.venv/bin/enginectl serve $(MODEL) --served-model-name $(NAME) $(ARGS)

test: ## Everything this machine's CPU can test in minutes
	@scripts/bootstrap.sh test
	$(PYTEST) -m "not slow and not gpu" $(ARGS)

test-slow: ## The tests that take longer
	@scripts/bootstrap.sh test
	$(PYTEST) -m "slow and not gpu" $(ARGS)

check: ## Lint, format and types
	@scripts/bootstrap.sh test
	@scripts/check.sh

bench: ## Benchmarks that need no peer, short: make bench ARGS="startup host_overhead"
	@scripts/bootstrap.sh test
	.venv/bin/python bench/run_all.py $(ARGS)
