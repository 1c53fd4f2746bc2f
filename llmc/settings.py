"""Everything llmc reads from the environment.

Other modules at most set variables for a library that reads them when it is imported, and pass the environment on to
child processes.

Variables:

    LLMC_CACHE_DIR   folder of the artifact store; default: the platform's user cache folder for "llmc"
    LLMC_SHARED_CACHE   folders of further stores that are only read, separated as in PATH: a read-only network mount
    LLMC_REMOTE_CACHE   URL of a remote store that is asked for what is not here, before it is built (s3://…, gs://…)
    LLMC_CACHE_MAX_SIZE     size that `llmc compile` trims the store to when it ends, as in 20G; default: no limit
    LLMC_SIGNING_KEY        file of the Ed25519 private key that signs what is pushed
    LLMC_SIGNING_PASSPHRASE that key's passphrase, where it has one
    LLMC_TRUSTED_KEYS       folder of the public keys that are trusted; default: in the user's configuration folder
    LLMC_TRUSTED_FOLDERS    folders, separated as in PATH, from which native code is loaded although others may write
                            there, as in a volume of a container that has one user
    LLMC_TOKEN_HOSTS        hosts of token services, separated by commas, that the account of a registry may be sent
                            to; default: the registry's own host, and its parent domains
    LLMC_ALLOW_UNSIGNED     true | 1: native code of a remote is taken without a signature
    LLMC_REQUIRE_SIGNATURES true | 1: every bundle, and everything that comes from a remote, has to be signed
    NEURON_COMPILED_ARTIFACTS    folder of a compiled bundle: loaded when it is there; else compiled and put there
    NEURON_PLATFORM_TARGET_OVERRIDE    trn1 | inf2 | trn2: the chip of `--device neuron`, where that names none
    NEURON_QUANT_DTYPE, NEURON_QUANT_DEVICE    have no effect, which a warning says at a compile for neuron
    VLLM_NEURON_FRAMEWORK        neuronx-distributed-inference | transformers-neuronx: for which of vLLM's paths the
                                 files beside a bundle for neuron are; default: vLLM Neuron's own
    NEURON_LOGICAL_NC_CONFIG     1 | 2: NeuronCores that make a logical one on trn2; default: 2
    VLLM_XLA_CACHE_PATH     folder of compiled XLA graphs: the artifact store of compiles for tpu and xla, where
                            LLMC_CACHE_DIR is not set
    VLLM_OPENVINO_DEVICE    what `--device openvino` stands for: CPU (default), GPU, GPU.1, NPU, NPU.4000
    VLLM_OPENVINO_KVCACHE_SPACE GiB that the KV cache may take, shared by all sequences; 0 or unset: room for each to
                            reach max_model_len, of which memory is taken as it is used
    VLLM_OPENVINO_CPU_KV_CACHE_PRECISION u8 | f32 | bf16: precision of the KV cache of bundles compiled for
                            openvino, unless --kv-cache-dtype says
    VLLM_OPENVINO_ENABLE_QUANTIZED_WEIGHTS  on | off: int8 weights, or none quantised, in bundles compiled for openvino,
                            unless --quantize says
    NUM_LPU_DEVICES         LPUs that `--device lpu` compiles for, a power of two; where it is set, lpu is the device of
                            compiles that name none
    NUM_GPU_DEVICES         GPUs that compute the prompts of an lpu bundle, whose LPUs then decode; default: 0
    LLMC_HYPERDEX_PYTHON    the Python of an environment with HyperDex; default: the one that runs llmc
    LLMC_HYPERDEX_SECONDS   seconds after which an LPU that gives no token counts as hung; default: 120
    VLLM_XLA_CHECK_RECOMPILATION true | 1: a graph that would have to be compiled while serving is an error
    CUDA_VISIBLE_DEVICES    the NVIDIA cards that this process may use; set to the empty string, none (CUDA's own)
    XLA_CLIENT_MEM_FRACTION, XLA_PYTHON_CLIENT_MEM_FRACTION
                            share of an NVIDIA card's memory that XLA may take, for bundles of cuda; default: 0.9 (XLA's
                            own, whose default is 0.75)
    XLA_FLAGS, LIBTPU_INIT_ARGS
                            flags that XLA and libtpu read: part of the key of what they compile
    LLMC_TORCH_XLA_PYTHON   the Python of an environment with torch-xla, for --lowering torch-xla; default:
                            .venv-torch-xla/bin/python here (make torch-xla-env)
    ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA, DNNL_MAX_CPU_ISA, MKL_ENABLE_INSTRUCTIONS, NPY_DISABLE_CPU_FEATURES
                            not acted on here: they make torch, oneDNN, MKL or numpy run other kernels than the host's
                            best, so what was verified under them counts for such runs only
    LLMC_OPEN_PORTABLE      true | 1: a bundle that was finished on its device's host is opened as the portable one it
                            was made of, which other hosts run on their CPU
    LLMC_API_KEY     key that `llmc serve` asks requests for, unless --api-key gives keys; default: none
    PT_HPU_LAZY_MODE 1: Gaudi's lazy mode, with HPU graphs; 0, the default: its eager mode, with torch.compile
    LLMC_ENFORCE_EAGER  true | 1: as --enforce-eager: a device that can run steps without compiling or capturing graphs
                     does so (hpu, inductor)
    LLMC_CUDA_GRAPHS    false | 0: bundles for inductor run compiled, with no CUDA graph captured; default: true
    VLLM_HPU_LOG_STEP_GRAPH_COMPILATION, VLLM_HPU_LOG_STEP_CPU_FALLBACKS
                     true | 1: each step on Gaudi that compiled graphs, or ran operators on the host, is logged; with
                     _ALL behind the name every step is
    PT_HPU_METRICS_GC_DETAILS, PT_HPU_RECIPE_CACHE_CONFIG
                     read by the Gaudi software itself
    VLLM_API_KEY     the same, as other servers spell it; LLMC_API_KEY wins
    LLMC_ADMIN_TOKEN        token of `llmc serve` for POST /admin/bundle, unless --admin-token gives one, and of `llmc
                            loop`; default: none, and the server takes no other bundle that way
    LLMC_PREFILL_KEY        key that `llmc prefill` and who sends prompts to it prove to each other; default: none
    LLMC_GRAMMAR_SECONDS    processor time that compiling one request's schema, expression or grammar may take;
                            default: 3
    LLMC_GRAMMAR_MEMORY     MiB of memory that it may take; default: 128
    LLMC_CPU_ISA     amx | avx512-bf16 | avx512-vnni | avx-vnni | avx2 | neon-i8mm | neon-dotprod: llmc behaves as on a
                     CPU with no more than this set of its kernels needs, which this CPU must run (docs/cpu.md);
                     default: all that this CPU has
    LLMC_THREADS     threads that compiling and running may use, at least 1; default: the CPUs this process
                     may use, and what the quotas of its control groups give it of them
    RAY_ADDRESS      the Ray cluster of `--executor ray`, unless --address names one (Ray's own)
    ORT_DISABLE_TELEMETRY, HF_HUB_DISABLE_TELEMETRY, DO_NOT_TRACK
                     set to 1 where they are not set, before what reads them is imported: nothing that llmc runs
                     reports to its makers (quiet.py)
    VLLM_BUCKETING_STRATEGY     lin | exp | pad, for both phases
    VLLM_{PROMPT|DECODE}_BUCKETING_STRATEGY    the same for one phase; wins over the one for both
    VLLM_EXPONENTIAL_BUCKETING  older spelling of VLLM_BUCKETING_STRATEGY: true | 1 is exp, false | 0 is lin
    VLLM_BUCKETING_FROM_FILE    a bucket file
    VLLM_{PROMPT|DECODE}_BS_BUCKET_{NUMBER}    one number of the range of batch sizes, in sequences
    VLLM_PROMPT_{QUERY|SEQ}_BUCKET_{NUMBER}    … of query lengths, in tokens; SEQ is the older spelling
    VLLM_{PROMPT|DECODE}_{CTX|BLOCK}_BUCKET_{NUMBER}    … of contexts, in KV cache blocks; BLOCK is the older spelling
    VLLM_DECODE_SEQ_BUCKET_{NUMBER}            … of decode contexts, in tokens; older than both
        {NUMBER} is MIN, STEP or MAX; LIMIT, how many values (exp); PAD_MAX, the most padding, and PAD_PERCENT, its
        most in percent of the bucket (pad). LIMIT and PAD_PERCENT count neither blocks nor tokens.
    MAX_MODEL_LEN, MAX_NUM_SEQS                the limits of these names, as vendors' serving images spell them
    MAX_SEQ_LEN_TO_CAPTURE                     tokens up to which lengths get buckets of their own; longer requests run
                                               through the few that coverage needs
    VLLM_TPU_BUCKET_PADDING_GAP    tokens from which the query lengths of powers-of-two-tpu grow by as much instead of
                                   doubling; 0: never
    VLLM_ENABLE_BUCKETING       false | 0 has no effect, which a warning says: every graph here is a bucket
    ZIG_GLOBAL_CACHE_DIR        the cache of the C compiler that builds kernels for onnxruntime; default: none is kept
    VLLM_CACHE_ROOT, XDG_CACHE_HOME, HOME, TRITON_CACHE_DIR, TRITON_HOME, NEURON_PLATFORM_TARGET_OVERRIDE,
    PT_HPU_RECIPE_CACHE_CONFIG, JAX_COMPILATION_CACHE_DIR, VLLM_XLA_CACHE_PATH
                                where other servers keep their compile caches, and for what chip: `llmc cache unpack`
                                puts a packed one there
    VLLM_SKIP_WARMUP            true | 1: `llmc serve` opens every graph and runs only two before it is ready; has no
                                effect on a plan, which a warning says
    VLLM_GRAPH_RESERVED_MEM     share of the usable memory that captured graphs may take, 0 … 1; default: 0.1
    VLLM_GRAPH_PROMPT_RATIO     share of that which prompt graphs may take first, 0 … 1; default: 0.3
    VLLM_GRAPH_{PROMPT|DECODE}_STRATEGY         min_tokens | max_bs: which graphs of a phase are captured first

A variable set to the empty string counts as unset. One that looks like a bucket range's and is none of these leaves a
warning. Only the standard library is imported here, and only its light parts, because every command pays for this
module.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from llmc.errors import InputError
from llmc.paths import expanded

if TYPE_CHECKING:
    from pathlib import Path

STRATEGY_SPELLINGS = {"lin": "linear", "exp": "exponential", "pad": "padding-aware"}
"""VLLM_BUCKETING_STRATEGY value → the strategy's name here."""

_EXPONENTIAL_SPELLINGS = {"true": "exponential", "1": "exponential", "false": "linear", "0": "linear"}

XLA_DEVICES = ("tpu", "xla")
"""Devices whose compiles VLLM_XLA_CACHE_PATH is about."""

BOUNDS = ("min", "step", "max")
PARAMETERS = (*BOUNDS, "limit", "pad_max", "pad_percent")
"""The numbers of one bucket range, as named in VLLM_*_BUCKET_{MIN|…}; the last three belong to one rule each."""

LIMIT_VARIABLES = {
    "max_model_len": "MAX_MODEL_LEN",
    "max_num_seqs": "MAX_NUM_SEQS",
    "max_seq_len_to_capture": "MAX_SEQ_LEN_TO_CAPTURE",
}
"""A server's argument → the variable that serving images set it by. BLOCK_SIZE is left to the core utilities."""

CPU_ISA = "LLMC_CPU_ISA"

KERNEL_VARIABLES = (
    "ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "NPY_DISABLE_CPU_FEATURES",
    "ONEDNN_MAX_CPU_ISA", CPU_ISA,
)  # fmt: skip
"""Variables by which libraries, and llmc, choose other CPU kernels than the best."""

MEMORY_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""The share of a card's memory that XLA may take, and its older spelling (jaxlib 0.10.2, xla_client.py)."""

Steps = Literal["none", "some", "all"]
"""Which steps a log is about."""

NEURON_FRAMEWORKS = ("neuronx-distributed-inference", "transformers-neuronx")
_NEURON_QUANT = ("NEURON_QUANT_DTYPE", "NEURON_QUANT_DEVICE")

_SWITCHES = {
    "": False, "0": False, "false": False, "no": False, "off": False, "1": True, "true": True, "yes": True, "on": True,
}  # fmt: skip
_PHASES = ("prompt", "decode")
_COUNTED_IN_BLOCKS = (*BOUNDS, "pad_max")

# (dimension, spellings from newest to oldest, as (name between phase and _BUCKET_, counted in blocks?))
_SPELLINGS: tuple[tuple[str, tuple[tuple[str, bool], ...]], ...] = (
    ("prompt_batch", (("PROMPT_BS", False),)),
    ("prompt_query", (("PROMPT_QUERY", False), ("PROMPT_SEQ", False))),
    ("prompt_context", (("PROMPT_CTX", True), ("PROMPT_BLOCK", True))),
    ("decode_batch", (("DECODE_BS", False),)),
    ("decode_context", (("DECODE_CTX", True), ("DECODE_BLOCK", True), ("DECODE_SEQ", False))),
)


def variables(names: Iterable[str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Those of these variables that are set: other programs' own, which say where they keep their caches."""
    return {name: environ[name] for name in names if environ.get(name)}


def cuda_visible_devices(environ: Mapping[str, str] = os.environ) -> str | None:
    """CUDA_VISIBLE_DEVICES as it is set; None where it is not. Here the empty string counts: it hides every card."""
    return environ.get("CUDA_VISIBLE_DEVICES")


def token_hosts(environ: Mapping[str, str] = os.environ) -> frozenset[str]:
    """The hosts that LLMC_TOKEN_HOSTS names, as artifacts/oci/login.py compares them."""
    return frozenset(filter(None, (host.strip().lower() for host in environ.get("LLMC_TOKEN_HOSTS", "").split(","))))


def cpu_isa(environ: Mapping[str, str] = os.environ) -> str | None:
    """The set of kernels that LLMC_CPU_ISA limits llmc to; None: it is not limited. `host.cpu_features` checks it."""
    return environ.get(CPU_ISA, "").strip().lower() or None


def xla_memory_fraction(environ: Mapping[str, str] = os.environ) -> float | None:
    """The share of a card's memory that XLA may take, as the user states it; None: it is not stated.

    Raises InputError for what is no share, and for both spellings of the variable at once, as jaxlib does.
    """
    given = variables(MEMORY_FRACTIONS, environ)
    if len(given) > 1:
        raise InputError(
            f"{' and '.join(given)} are both set; unset {MEMORY_FRACTIONS[1]}, which is the older spelling"
        )
    return next((_share(environ, name) for name in given), None)


@dataclass(frozen=True)
class BucketNumber:
    """One number of a bucket range as the environment gives it.

    `blocks` is true when `value` counts KV cache blocks (of `block_size` tokens) and not tokens.
    """

    value: int
    variable: str
    blocks: bool = False

    def in_tokens(self, block_size: int) -> int:
        """The value in tokens (or sequences, for a batch)."""
        return self.value * block_size if self.blocks else self.value


@dataclass(frozen=True)
class Settings:
    """What the environment asks for; build it once, with `from_environment`, and pass it down.

    `strategy` comes from `strategy_variable`, and both are None where no variable names one for both phases;
    `phase_strategies` maps "prompt" or "decode" to a strategy for it alone. `bucket_numbers` maps (dimension,
    parameter), for example ("prompt_batch", "max"), to the number set for it. `tpu_padding_gap` is None for no gap.
    `limit_numbers` maps a name of `LIMIT_VARIABLES` to the number set for it, `kernel_limits` one of
    `KERNEL_VARIABLES` to its value.
    `warnings` are sentences for the user about variables that are overruled, without effect or not understood.
    """

    cache_override: str | None = None
    xla_cache: str | None = None
    check_recompilation: bool = False
    xla_flags: str = ""
    libtpu_arguments: str = ""
    torch_xla_python: str | None = None
    shared_caches: tuple[str, ...] = ()
    remote_cache: str | None = None
    ray_address: str | None = None
    cache_max_size: str | None = None
    signing_key: str | None = None
    signing_passphrase: str | None = field(default=None, repr=False)
    trusted_keys_override: str | None = None
    trusted_folders: tuple[str, ...] = ()
    allow_unsigned: bool = False
    require_signatures: bool = False
    open_portable: bool = False
    neuron_artifacts: str | None = None
    num_lpu_devices: int | None = None
    num_gpu_devices: int = 0
    hyperdex_python: str | None = None
    hyperdex_seconds: float = 120.0
    neuron_target: str | None = None
    neuron_cores: int | None = None
    neuron_quantisation: Mapping[str, str] = field(default_factory=dict)
    neuron_framework: str | None = None
    openvino_device: str | None = None
    openvino_kv_space: float | None = None
    openvino_kv_precision: str | None = None
    openvino_quantized: bool | None = None
    kernel_limits: Mapping[str, str] = field(default_factory=dict)
    skip_warmup: bool = False
    enforce_eager: bool = False
    hpu_lazy_mode: bool = False
    cuda_graphs: bool = True
    log_step_compilations: Steps = "none"
    log_step_fallbacks: Steps = "none"
    api_key: str | None = field(default=None, repr=False)
    admin_token: str | None = field(default=None, repr=False)
    prefill_key: str | None = field(default=None, repr=False)
    threads_override: int | None = None
    grammar_seconds: float = 3.0
    grammar_memory: int = 128
    strategy: str | None = None
    strategy_variable: str | None = None
    phase_strategies: Mapping[str, str] = field(default_factory=dict)
    bucket_file: str | None = None
    bucket_numbers: Mapping[tuple[str, str], BucketNumber] = field(default_factory=dict)
    tpu_padding_gap: BucketNumber | None = None
    limit_numbers: Mapping[str, BucketNumber] = field(default_factory=dict)
    graph_reserved_mem: float | None = None
    graph_prompt_ratio: float | None = None
    graph_prompt_strategy: str | None = None
    graph_decode_strategy: str | None = None
    warnings: tuple[str, ...] = ()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read every variable this module documents.

        Raises InputError, naming the variable and its value, for a number that is not an integer, a thread
        count below 1, a padding gap below 0, a share outside 0 … 1, or a strategy that is not one of
        `STRATEGY_SPELLINGS`.
        """
        warnings: list[str] = []
        numbers = _bucket_numbers(environ, warnings)
        strategy, strategy_variable = _common_strategy(environ, warnings)
        phases = {phase: _strategy(environ, f"VLLM_{phase.upper()}_BUCKETING_STRATEGY") for phase in _PHASES}
        warnings += _without_effect(environ)
        return cls(
            cache_override=environ.get("LLMC_CACHE_DIR") or None,
            xla_cache=environ.get("VLLM_XLA_CACHE_PATH") or None,
            check_recompilation=_switch(environ, "VLLM_XLA_CHECK_RECOMPILATION"),
            xla_flags=environ.get("XLA_FLAGS", ""),
            libtpu_arguments=environ.get("LIBTPU_INIT_ARGS", ""),
            torch_xla_python=environ.get("LLMC_TORCH_XLA_PYTHON") or None,
            shared_caches=_folders(environ, "LLMC_SHARED_CACHE"),
            remote_cache=environ.get("LLMC_REMOTE_CACHE") or None,
            ray_address=environ.get("RAY_ADDRESS") or None,
            cache_max_size=environ.get("LLMC_CACHE_MAX_SIZE") or None,
            signing_key=environ.get("LLMC_SIGNING_KEY") or None,
            signing_passphrase=environ.get("LLMC_SIGNING_PASSPHRASE") or None,
            trusted_keys_override=environ.get("LLMC_TRUSTED_KEYS") or None,
            trusted_folders=_folders(environ, "LLMC_TRUSTED_FOLDERS"),
            allow_unsigned=_switch(environ, "LLMC_ALLOW_UNSIGNED"),
            require_signatures=_switch(environ, "LLMC_REQUIRE_SIGNATURES"),
            open_portable=_switch(environ, "LLMC_OPEN_PORTABLE"),
            num_lpu_devices=_at_least_one(environ, "NUM_LPU_DEVICES", "unset it for one LPU"),
            num_gpu_devices=_count(environ, "NUM_GPU_DEVICES"),
            hyperdex_python=environ.get("LLMC_HYPERDEX_PYTHON") or None,
            hyperdex_seconds=_seconds(environ, "LLMC_HYPERDEX_SECONDS", 120.0),
            openvino_device=environ.get("VLLM_OPENVINO_DEVICE") or None,
            openvino_kv_space=_gibibytes(environ, "VLLM_OPENVINO_KVCACHE_SPACE"),
            openvino_kv_precision=environ.get("VLLM_OPENVINO_CPU_KV_CACHE_PRECISION", "").strip().lower() or None,
            openvino_quantized=_optional_switch(environ, "VLLM_OPENVINO_ENABLE_QUANTIZED_WEIGHTS"),
            neuron_artifacts=environ.get("NEURON_COMPILED_ARTIFACTS") or None,
            neuron_target=environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", "").strip().lower() or None,
            neuron_quantisation={name: environ[name] for name in _NEURON_QUANT if environ.get(name)},
            neuron_framework=_neuron_framework(environ),
            neuron_cores=_at_least_one(environ, "NEURON_LOGICAL_NC_CONFIG", "unset it for the chip's default"),
            kernel_limits={name: environ[name] for name in KERNEL_VARIABLES if environ.get(name)},
            skip_warmup=environ.get("VLLM_SKIP_WARMUP", "").strip().lower() in {"true", "1"},
            admin_token=environ.get("LLMC_ADMIN_TOKEN", "").strip() or None,
            prefill_key=environ.get("LLMC_PREFILL_KEY", "").strip() or None,
            enforce_eager=_switch(environ, "LLMC_ENFORCE_EAGER"),
            hpu_lazy_mode=_switch(environ, "PT_HPU_LAZY_MODE"),
            cuda_graphs=_optional_switch(environ, "LLMC_CUDA_GRAPHS") is not False,
            log_step_compilations=_steps(environ, "VLLM_HPU_LOG_STEP_GRAPH_COMPILATION"),
            log_step_fallbacks=_steps(environ, "VLLM_HPU_LOG_STEP_CPU_FALLBACKS"),
            api_key=environ.get("LLMC_API_KEY", "").strip() or environ.get("VLLM_API_KEY", "").strip() or None,
            threads_override=_at_least_one(environ, "LLMC_THREADS", "unset it to use every usable CPU"),
            grammar_seconds=_seconds(environ, "LLMC_GRAMMAR_SECONDS", 3.0),
            grammar_memory=_at_least_one(environ, "LLMC_GRAMMAR_MEMORY", "unset it for 128") or 128,
            strategy=strategy,
            strategy_variable=strategy_variable,
            phase_strategies={phase: name for phase, name in phases.items() if name is not None},
            bucket_file=environ.get("VLLM_BUCKETING_FROM_FILE") or None,
            bucket_numbers=numbers,
            tpu_padding_gap=_tpu_padding_gap(environ),
            limit_numbers=_limit_numbers(environ),
            graph_reserved_mem=_share(environ, "VLLM_GRAPH_RESERVED_MEM"),
            graph_prompt_ratio=_share(environ, "VLLM_GRAPH_PROMPT_RATIO"),
            graph_prompt_strategy=environ.get("VLLM_GRAPH_PROMPT_STRATEGY", "").strip() or None,
            graph_decode_strategy=environ.get("VLLM_GRAPH_DECODE_STRATEGY", "").strip() or None,
            warnings=tuple(warnings),
        )

    @property
    def device(self) -> str:
        """The device of compiles that name none."""
        return "cpu" if self.num_lpu_devices is None else "lpu"

    @property
    def cache_dir(self) -> Path:
        """The artifact store's folder; it may not exist yet."""
        if self.cache_override is not None:
            return expanded(self.cache_override)
        return self.user_cache_dir

    @property
    def user_cache_dir(self) -> Path:
        """The folder for this user's caches of llmc, whatever store is named; it may not exist yet."""
        from pathlib import Path

        if sys.platform == "linux" and not os.environ.get("XDG_CACHE_HOME"):
            return expanded("~/.cache/llmc")  # as platformdirs has it, which takes longer to import
        from platformdirs import user_cache_dir

        return Path(user_cache_dir("llmc"))

    def cache_dir_for(self, device: str | None) -> Path:
        """The artifact store's folder for compiles for a device: for XLA devices, where another one is named."""
        named = device is not None and device.partition(":")[0] in XLA_DEVICES
        if named and self.cache_override is None and self.xla_cache is not None:
            return expanded(self.xla_cache)
        return self.cache_dir

    @property
    def trusted_keys(self) -> Path:
        """The folder of trusted public keys; it may not exist."""
        from pathlib import Path

        if self.trusted_keys_override is not None:
            return expanded(self.trusted_keys_override)
        from platformdirs import user_config_dir

        return Path(user_config_dir("llmc")) / "trusted"

    @property
    def threads(self) -> int:
        """Threads to use, at least 1: LLMC_THREADS, or else the CPUs that this process has (cpus.py)."""
        if self.threads_override is not None:
            return self.threads_override
        from llmc.cpus import usable_cpus

        return usable_cpus()


def _folders(environ: Mapping[str, str], variable: str) -> tuple[str, ...]:
    return tuple(filter(None, environ.get(variable, "").split(os.pathsep)))


def _neuron_framework(environ: Mapping[str, str]) -> str | None:
    name = environ.get("VLLM_NEURON_FRAMEWORK", "").strip()
    if name and name not in NEURON_FRAMEWORKS:
        raise InputError(f"VLLM_NEURON_FRAMEWORK={name!r} is not one of {', '.join(NEURON_FRAMEWORKS)}; or unset it")
    return name or None


def _steps(environ: Mapping[str, str], variable: str) -> Steps:
    """Which steps a log is about: those that have something to tell, all, or none."""
    if _switch(environ, f"{variable}_ALL"):
        return "all"
    return "some" if _switch(environ, variable) else "none"


def _strategy(environ: Mapping[str, str], variable: str) -> str | None:
    spelling = environ.get(variable, "").strip()
    if not spelling:
        return None
    try:
        return STRATEGY_SPELLINGS[spelling]
    except KeyError:
        known = ", ".join(STRATEGY_SPELLINGS)
        raise InputError(f"{variable}={spelling!r} is not one of {known}") from None


def _common_strategy(environ: Mapping[str, str], warnings: list[str]) -> tuple[str | None, str | None]:
    """The strategy for both phases and the variable it comes from."""
    variable, older = "VLLM_BUCKETING_STRATEGY", "VLLM_EXPONENTIAL_BUCKETING"
    strategy = _strategy(environ, variable)
    text = environ.get(older, "").strip()
    if text and text.lower() not in _EXPONENTIAL_SPELLINGS:
        raise InputError(f"{older}={text!r} is not true or false; set {variable} to lin or exp instead")
    if strategy is not None:
        if text:
            warnings.append(f"{older} is ignored: {variable} is set, and is its newer spelling")
        return strategy, variable
    return (_EXPONENTIAL_SPELLINGS[text.lower()], older) if text else (None, None)


def _without_effect(environ: Mapping[str, str]) -> list[str]:
    """Warnings about settings of the vendor's planner that change nothing here."""
    found = []
    if environ.get("VLLM_ENABLE_BUCKETING", "").strip().lower() in {"false", "0"}:
        found.append("VLLM_ENABLE_BUCKETING has no effect: every graph of a plan is a bucket, there is no other kind")
    if environ.get("VLLM_SKIP_WARMUP", "").strip().lower() in {"true", "1"}:
        found.append("VLLM_SKIP_WARMUP has no effect on a plan: it lists every graph, warmed up or not")
    return found


def _limit_numbers(environ: Mapping[str, str]) -> dict[str, BucketNumber]:
    found = {}
    for name, variable in LIMIT_VARIABLES.items():
        value = _integer(environ, variable)
        if value is not None:
            if value < 1:
                raise InputError(f"{variable}={value} must be at least 1; unset it for the default")
            found[name] = BucketNumber(value, variable)
    return found


def _tpu_padding_gap(environ: Mapping[str, str]) -> BucketNumber | None:
    variable = "VLLM_TPU_BUCKET_PADDING_GAP"
    gap = _integer(environ, variable)
    if gap is not None and gap < 0:
        raise InputError(f"{variable}={gap} must not be negative; set 0, or unset it, for no gap")
    return BucketNumber(gap, variable) if gap else None


def _bucket_numbers(environ: Mapping[str, str], warnings: list[str]) -> dict[tuple[str, str], BucketNumber]:
    numbers: dict[tuple[str, str], BucketNumber] = {}
    understood: set[str] = set()
    for dimension, spellings in _SPELLINGS:
        for parameter in PARAMETERS:
            for name, in_blocks in spellings:
                variable = f"VLLM_{name}_BUCKET_{parameter.upper()}"
                understood.add(variable)
                value = _integer(environ, variable)
                if value is None:
                    continue
                number = BucketNumber(value, variable, in_blocks and parameter in _COUNTED_IN_BLOCKS)
                winner = numbers.setdefault((dimension, parameter), number)
                if winner.variable != variable:
                    warnings.append(f"{variable} is ignored: {winner.variable} is set, and is its newer spelling")
    for variable in sorted(set(environ) - understood):
        if variable.startswith(("VLLM_PROMPT_", "VLLM_DECODE_")) and "_BUCKET_" in variable:
            nearest = _nearest(variable, understood)
            warnings.append(f"{variable} is ignored: llmc plans nothing from it; the nearest it knows is {nearest}")
    return numbers


def _nearest(variable: str, known: set[str]) -> str:
    from difflib import get_close_matches

    return get_close_matches(variable, sorted(known), n=1, cutoff=0.0)[0]


def _switch(environ: Mapping[str, str], variable: str) -> bool:
    """Whether a variable says true, 1 …; raises InputError for what is neither that nor false."""
    text = environ.get(variable, "").strip().lower()
    if text not in _SWITCHES:
        raise InputError(f"{variable}={text!r} is not true or false; set 1, or unset it")
    return _SWITCHES[text]


def _optional_switch(environ: Mapping[str, str], variable: str) -> bool | None:
    """As `_switch`; None where it is not set."""
    return _switch(environ, variable) if environ.get(variable, "").strip() else None


def _integer(environ: Mapping[str, str], variable: str) -> int | None:
    """A whole number; None where it is not set. Raises InputError."""
    text = environ.get(variable, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{variable}={text!r} is not an integer; set a whole number or unset it") from None


def _count(environ: Mapping[str, str], variable: str) -> int:
    """A whole number from 0, 0 where it is not set. Raises InputError."""
    value = _integer(environ, variable) or 0
    if value < 0:
        raise InputError(f"{variable}={value} must not be negative; unset it for none")
    return value


def _at_least_one(environ: Mapping[str, str], variable: str, remedy: str) -> int | None:
    """A whole number from 1; None where it is not set. Raises InputError, which ends in `remedy`."""
    number = _integer(environ, variable)
    if number is not None and number < 1:
        raise InputError(f"{variable}={number} must be at least 1; {remedy}")
    return number


def _gibibytes(environ: Mapping[str, str], variable: str) -> float | None:
    """A size in GiB; None for 0, which asks for the default."""
    text = environ.get(variable, "").strip()
    try:
        space = float(text or 0)
    except ValueError:
        space = -1.0
    if not 0 <= space < float("inf"):
        raise InputError(f"{variable}={text!r} is not a size in GiB; set a number such as 4, or unset it")
    return space or None


def _seconds(environ: Mapping[str, str], variable: str, default: float) -> float:
    """Seconds above 0. Raises InputError."""
    text = environ.get(variable, "").strip()
    try:
        found = float(text or default)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise InputError(f"{variable}={text!r} is not a number of seconds above 0; set one, or unset it")
    return found


def _share(environ: Mapping[str, str], variable: str) -> float | None:
    """A number from 0 to 1; None where it is not set. Raises InputError."""
    text = environ.get(variable, "").strip()
    try:
        found = float(text) if text else None
    except ValueError:
        found = -1.0
    if found is not None and not 0 <= found <= 1:
        raise InputError(f"{variable}={text!r} is not a share within 0 … 1; set one such as 0.3, or unset it")
    return found
