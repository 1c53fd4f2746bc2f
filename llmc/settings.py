"""Everything llmc reads from the environment.

Other modules only set variables that a library reads when it is imported, and pass the environment to child processes.

Variables:

    LLMC_CACHE_DIR          folder of the artifact store; default: the platform's user cache folder for "llmc"
    LLMC_SHARED_CACHE       folders of more stores, read only, separated as in PATH: for example a network mount
    LLMC_REMOTE_CACHE       URL of a remote store (s3://…, gs://…) to look up before building something
    LLMC_CACHE_MAX_SIZE     size to which `llmc compile` trims the store when it ends, as in 20G; default: no limit
    LLMC_SIGNING_KEY        file of the Ed25519 private key that signs pushed artifacts
    LLMC_SIGNING_PASSPHRASE passphrase of that key
    LLMC_TRUSTED_KEYS       folder of the trusted public keys; default: in the user's configuration folder
    LLMC_TRUSTED_FOLDERS    folders, separated as in PATH, from which native code is loaded although others may write
                            there, as in a volume of a container that has one user
    LLMC_TOKEN_HOSTS        token service hosts, separated by commas, that may receive a registry's credentials;
                            default: the registry's own host and its parent domains
    LLMC_ALLOW_UNSIGNED     true | 1: accept native code from a remote without a signature
    LLMC_REQUIRE_SIGNATURES true | 1: require a signature on every bundle and everything from a remote
    NEURON_COMPILED_ARTIFACTS    folder of a compiled bundle: loaded if it exists, otherwise compiled there
    NEURON_PLATFORM_TARGET_OVERRIDE    trn1 | inf2 | trn2: the chip of `--device neuron`, if the device names none
    NEURON_QUANT_DTYPE, NEURON_QUANT_DEVICE    no effect; a compile for neuron warns about them
    VLLM_NEURON_FRAMEWORK        neuronx-distributed-inference | transformers-neuronx: vLLM backend that the files next
                                 to a bundle for neuron are for; default: vLLM Neuron's own
    NEURON_LOGICAL_NC_CONFIG     1 | 2: NeuronCores per logical core on trn2; default: 2
    VLLM_XLA_CACHE_PATH     folder of compiled XLA graphs: the artifact store of compiles for tpu and xla, if
                            LLMC_CACHE_DIR is not set
    VLLM_OPENVINO_DEVICE    device behind `--device openvino`: CPU (default), GPU, GPU.1, NPU, NPU.4000
    VLLM_OPENVINO_KVCACHE_SPACE    GiB for the KV cache of all sequences; 0 or unset: room for every sequence to reach
                            max_model_len, with memory taken as it is used
    VLLM_OPENVINO_CPU_KV_CACHE_PRECISION    u8 | f32 | bf16: KV cache precision of bundles compiled for openvino,
                            unless --kv-cache-dtype is given
    VLLM_OPENVINO_ENABLE_QUANTIZED_WEIGHTS  on | off: int8 or unquantized weights in bundles compiled for openvino,
                            unless --quantize is given
    NUM_LPU_DEVICES         number of LPUs for `--device lpu`, a power of two; if set, lpu is the default device
    NUM_GPU_DEVICES         GPUs that run prefill for an lpu bundle, whose LPUs then decode; default: 0
    LLMC_HYPERDEX_PYTHON    Python of an environment with HyperDex; default: the one that runs llmc
    LLMC_HYPERDEX_SECONDS   seconds after which an LPU that returns no token counts as hung; default: 120
    VLLM_XLA_CHECK_RECOMPILATION true | 1: compiling a graph while serving is an error
    CUDA_VISIBLE_DEVICES    NVIDIA GPUs that this process may use; the empty string hides all (CUDA's own variable)
    XLA_CLIENT_MEM_FRACTION, XLA_PYTHON_CLIENT_MEM_FRACTION
                            share of GPU memory that XLA may take for bundles of cuda; default: 0.9 (XLA's own
                            variables, whose default is 0.75)
    XLA_FLAGS, LIBTPU_INIT_ARGS
                            flags of XLA and libtpu: part of the key of compiled graphs
    LLMC_TORCH_XLA_PYTHON   Python of an environment with torch-xla, for --lowering torch-xla; default:
                            .venv-torch-xla/bin/python here (make torch-xla-env)
    ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA, DNNL_MAX_CPU_ISA, MKL_ENABLE_INSTRUCTIONS, NPY_DISABLE_CPU_FEATURES
                            make torch, oneDNN, MKL or numpy use other kernels than the host's best; llmc only records
                            them, because a verification under them does not hold for other runs
    LLMC_OPEN_PORTABLE      true | 1: open a bundle that was completed on its device's host in its portable form, which
                            other hosts run on their CPU
    LLMC_API_KEY            key that `llmc serve` requires of requests, unless --api-key is given; default: none
    PT_HPU_LAZY_MODE        1: Gaudi's lazy mode, with HPU graphs; 0, the default: its eager mode, with torch.compile
    LLMC_ENFORCE_EAGER      true | 1: same as --enforce-eager: devices that can run steps without compiling or capturing
                            graphs do so (hpu, inductor)
    LLMC_CUDA_GRAPHS        false | 0: bundles for inductor run compiled, without CUDA graphs; default: true
    VLLM_HPU_LOG_STEP_GRAPH_COMPILATION, VLLM_HPU_LOG_STEP_CPU_FALLBACKS
                            true | 1: log each step on Gaudi that compiled graphs, or ran operators on the host; with
                            the suffix _ALL every step
    PT_HPU_METRICS_GC_DETAILS, PT_HPU_RECIPE_CACHE_CONFIG
                            read by the Gaudi software itself
    VLLM_API_KEY            another name of LLMC_API_KEY, which takes precedence
    LLMC_ADMIN_TOKEN        token for POST /admin/bundle of `llmc serve`, unless --admin-token is given, and of `llmc
                            loop`; default: none, which turns bundle swaps over HTTP off
    LLMC_PREFILL_KEY        key shared by `llmc prefill` and its clients; default: none
    LLMC_GRAMMAR_SECONDS    CPU time for compiling one request's schema, expression or grammar; default: 3
    LLMC_GRAMMAR_MEMORY     MiB of memory for that; default: 128
    LLMC_CPU_ISA            amx | avx512-bf16 | avx512-vnni | avx-vnni | avx2 | neon-i8mm | neon-dotprod: highest ISA
                            variant of llmc's kernels to use; this CPU must support it (docs/cpu.md); default: the best
    LLMC_THREADS            threads for compiling and running, at least 1; default: the CPUs this process may use,
                            limited by the quotas of its control groups
    RAY_ADDRESS             Ray cluster of `--executor ray`, unless --address is given (Ray's own variable)
    ORT_DISABLE_TELEMETRY, HF_HUB_DISABLE_TELEMETRY, DO_NOT_TRACK
                            set to 1 unless already set, before the libraries that read them are imported, so that no
                            library reports usage (quiet.py)
    VLLM_BUCKETING_STRATEGY     lin | exp | pad, for both phases
    VLLM_{PROMPT|DECODE}_BUCKETING_STRATEGY    the strategy of one phase; overrides the one for both
    VLLM_EXPONENTIAL_BUCKETING  older form of VLLM_BUCKETING_STRATEGY: true | 1 is exp, false | 0 is lin
    VLLM_BUCKETING_FROM_FILE    a bucket file
    VLLM_{PROMPT|DECODE}_BS_BUCKET_{NUMBER}    one number of the batch size range, in sequences
    VLLM_PROMPT_{QUERY|SEQ}_BUCKET_{NUMBER}    … of the query length range, in tokens; SEQ is the older name
    VLLM_{PROMPT|DECODE}_{CTX|BLOCK}_BUCKET_{NUMBER}    … of the context range, in KV cache blocks; BLOCK is older
    VLLM_DECODE_SEQ_BUCKET_{NUMBER}            … of the decode context range, in tokens; older than both
        {NUMBER} is MIN, STEP or MAX; LIMIT, the number of values (exp); PAD_MAX, the most padding; or PAD_PERCENT, the
        most padding in percent of the bucket (pad). LIMIT and PAD_PERCENT are neither blocks nor tokens.
    MAX_MODEL_LEN, MAX_NUM_SEQS                the limits, as named by vendors' serving images
    MAX_SEQ_LEN_TO_CAPTURE                     longest length in tokens that gets its own buckets; longer requests use
                                               the few buckets that coverage needs
    VLLM_TPU_BUCKET_PADDING_GAP    tokens from which query lengths of powers-of-two-tpu grow by this many instead of
                                   doubling; 0: never
    VLLM_ENABLE_BUCKETING       false | 0 has no effect and a warning says so: every graph here is a bucket
    ZIG_GLOBAL_CACHE_DIR        cache of the C compiler that builds kernels for onnxruntime; default: no cache
    VLLM_CACHE_ROOT, XDG_CACHE_HOME, HOME, TRITON_CACHE_DIR, TRITON_HOME, NEURON_PLATFORM_TARGET_OVERRIDE,
    PT_HPU_RECIPE_CACHE_CONFIG, JAX_COMPILATION_CACHE_DIR, VLLM_XLA_CACHE_PATH
                                where other servers keep their compile caches, and for which chip: the targets of
                                `llmc cache unpack`
    VLLM_SKIP_WARMUP            true | 1: `llmc serve` opens every graph but runs only two before it is ready; no effect
                                on plans, which a warning says
    VLLM_GRAPH_RESERVED_MEM     share of the usable memory for captured graphs, 0 … 1; default: 0.1
    VLLM_GRAPH_PROMPT_RATIO     share of that which prefill graphs may take first, 0 … 1; default: 0.3
    VLLM_GRAPH_{PROMPT|DECODE}_STRATEGY         min_tokens | max_bs: which graphs of a phase are captured first

A variable set to the empty string counts as unset. Unknown variables that look like a bucket range's cause a warning.
Only light parts of the standard library are imported here, because every command imports this module.
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
"""VLLM_BUCKETING_STRATEGY value → llmc's name of the strategy."""

_EXPONENTIAL_SPELLINGS = {"true": "exponential", "1": "exponential", "false": "linear", "0": "linear"}

XLA_DEVICES = ("tpu", "xla")
"""Devices to which VLLM_XLA_CACHE_PATH applies."""

BOUNDS = ("min", "step", "max")
PARAMETERS = (*BOUNDS, "limit", "pad_max", "pad_percent")
"""Parameters of one bucket range, as named in VLLM_*_BUCKET_{MIN|…}; the last three belong to one strategy each."""

LIMIT_VARIABLES = {
    "max_model_len": "MAX_MODEL_LEN",
    "max_num_seqs": "MAX_NUM_SEQS",
    "max_seq_len_to_capture": "MAX_SEQ_LEN_TO_CAPTURE",
}
"""Server argument → the variable that serving images use for it. BLOCK_SIZE is left to the core utilities."""

CPU_ISA = "LLMC_CPU_ISA"

KERNEL_VARIABLES = (
    "ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "NPY_DISABLE_CPU_FEATURES",
    "ONEDNN_MAX_CPU_ISA", CPU_ISA,
)  # fmt: skip
"""Variables that make libraries, or llmc, use CPU kernels other than the best."""

MEMORY_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Share of GPU memory that XLA may take: the variable and its older name (jaxlib 0.10.2, xla_client.py)."""

Steps = Literal["none", "some", "all"]
"""Which steps to log."""

NEURON_FRAMEWORKS = ("neuronx-distributed-inference", "transformers-neuronx")
_NEURON_QUANT = ("NEURON_QUANT_DTYPE", "NEURON_QUANT_DEVICE")

_SWITCHES = {
    "": False, "0": False, "false": False, "no": False, "off": False, "1": True, "true": True, "yes": True, "on": True,
}  # fmt: skip
_PHASES = ("prompt", "decode")
_COUNTED_IN_BLOCKS = (*BOUNDS, "pad_max")

# (dimension, names from newest to oldest, as (part between VLLM_ and _BUCKET_, whether it counts blocks))
_SPELLINGS: tuple[tuple[str, tuple[tuple[str, bool], ...]], ...] = (
    ("prompt_batch", (("PROMPT_BS", False),)),
    ("prompt_query", (("PROMPT_QUERY", False), ("PROMPT_SEQ", False))),
    ("prompt_context", (("PROMPT_CTX", True), ("PROMPT_BLOCK", True))),
    ("decode_batch", (("DECODE_BS", False),)),
    ("decode_context", (("DECODE_CTX", True), ("DECODE_BLOCK", True), ("DECODE_SEQ", False))),
)


def variables(names: Iterable[str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The given variables that are set, for other programs' cache locations."""
    return {name: environ[name] for name in names if environ.get(name)}


def cuda_visible_devices(environ: Mapping[str, str] = os.environ) -> str | None:
    """CUDA_VISIBLE_DEVICES, or None if unset. The empty string counts as set, because it hides every GPU."""
    return environ.get("CUDA_VISIBLE_DEVICES")


def token_hosts(environ: Mapping[str, str] = os.environ) -> frozenset[str]:
    """The hosts in LLMC_TOKEN_HOSTS, in the form that artifacts/oci/registry.py compares."""
    return frozenset(filter(None, (host.strip().lower() for host in environ.get("LLMC_TOKEN_HOSTS", "").split(","))))


def cpu_isa(environ: Mapping[str, str] = os.environ) -> str | None:
    """The ISA variant that LLMC_CPU_ISA limits llmc to, or None. `host.cpu_features` validates it."""
    return environ.get(CPU_ISA, "").strip().lower() or None


def xla_memory_fraction(environ: Mapping[str, str] = os.environ) -> float | None:
    """The share of GPU memory that XLA may take, or None if the user sets none.

    Raises InputError for an invalid share, and for both names of the variable at once, as jaxlib does.
    """
    given = variables(MEMORY_FRACTIONS, environ)
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} are both set; unset {MEMORY_FRACTIONS[1]}, which is the older name")
    return next((_share(environ, name) for name in given), None)


@dataclass(frozen=True)
class BucketNumber:
    """One number of a bucket range from the environment.

    `blocks` is true if `value` counts KV cache blocks (of `block_size` tokens) instead of tokens.
    """

    value: int
    variable: str
    blocks: bool = False

    def in_tokens(self, block_size: int) -> int:
        """The value in tokens (or sequences, for a batch)."""
        return self.value * block_size if self.blocks else self.value


@dataclass(frozen=True)
class Settings:
    """Settings from the environment; build them once with `from_environment` and pass them on.

    `strategy` comes from `strategy_variable`; both are None if no variable sets one for both phases. `phase_strategies`
    maps "prompt" or "decode" to that phase's strategy. `bucket_numbers` maps (dimension, parameter), such as
    ("prompt_batch", "max"), to its number. `tpu_padding_gap` is None for no gap. `limit_numbers` maps names of
    `LIMIT_VARIABLES` to their numbers, `kernel_limits` names of `KERNEL_VARIABLES` to their values. `warnings` are
    sentences for the user about variables that are overridden, without effect or unknown.
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
        """Read every variable that this module documents.

        Raises InputError, naming the variable and its value, for a number that is not an integer, a thread count below
        1, a padding gap below 0, a share outside 0 … 1, or a strategy that is not one of `STRATEGY_SPELLINGS`.
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
        """The default device."""
        return "cpu" if self.num_lpu_devices is None else "lpu"

    @property
    def cache_dir(self) -> Path:
        """The artifact store's folder, which may not exist yet."""
        if self.cache_override is not None:
            return expanded(self.cache_override)
        return self.user_cache_dir

    @property
    def user_cache_dir(self) -> Path:
        """The folder for this user's caches, independent of the store's folder; it may not exist yet."""
        from pathlib import Path

        if sys.platform == "linux" and not os.environ.get("XDG_CACHE_HOME"):
            return expanded("~/.cache/llmc")  # same as platformdirs, which is slow to import
        from platformdirs import user_cache_dir

        return Path(user_cache_dir("llmc"))

    def cache_dir_for(self, device: str | None) -> Path:
        """The artifact store's folder for a device: VLLM_XLA_CACHE_PATH for XLA, unless LLMC_CACHE_DIR is set."""
        named = device is not None and device.partition(":")[0] in XLA_DEVICES
        if named and self.cache_override is None and self.xla_cache is not None:
            return expanded(self.xla_cache)
        return self.cache_dir

    @property
    def trusted_keys(self) -> Path:
        """The folder of trusted public keys, which may not exist."""
        from pathlib import Path

        if self.trusted_keys_override is not None:
            return expanded(self.trusted_keys_override)
        from platformdirs import user_config_dir

        return Path(user_config_dir("llmc")) / "trusted"

    @property
    def threads(self) -> int:
        """Threads to use, at least 1: LLMC_THREADS, else the CPUs of this process (cpus.py)."""
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
    variable, older = "VLLM_BUCKETING_STRATEGY", "VLLM_EXPONENTIAL_BUCKETING"
    strategy = _strategy(environ, variable)
    text = environ.get(older, "").strip()
    if text and text.lower() not in _EXPONENTIAL_SPELLINGS:
        raise InputError(f"{older}={text!r} is not true or false; set {variable} to lin or exp instead")
    if strategy is not None:
        if text:
            warnings.append(f"{older} is ignored: its newer name {variable} is set")
        return strategy, variable
    return (_EXPONENTIAL_SPELLINGS[text.lower()], older) if text else (None, None)


def _without_effect(environ: Mapping[str, str]) -> list[str]:
    found = []
    if environ.get("VLLM_ENABLE_BUCKETING", "").strip().lower() in {"false", "0"}:
        found.append("VLLM_ENABLE_BUCKETING has no effect: every graph of a plan is a bucket")
    if environ.get("VLLM_SKIP_WARMUP", "").strip().lower() in {"true", "1"}:
        found.append("VLLM_SKIP_WARMUP has no effect on a plan, which lists every graph")
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
                    warnings.append(f"{variable} is ignored: its newer name {winner.variable} is set")
    for variable in sorted(set(environ) - understood):
        if variable.startswith(("VLLM_PROMPT_", "VLLM_DECODE_")) and "_BUCKET_" in variable:
            nearest = _nearest(variable, understood)
            warnings.append(f"{variable} is ignored: llmc does not know it; the nearest known variable is {nearest}")
    return numbers


def _nearest(variable: str, known: set[str]) -> str:
    from difflib import get_close_matches

    return get_close_matches(variable, sorted(known), n=1, cutoff=0.0)[0]


def _switch(environ: Mapping[str, str], variable: str) -> bool:
    text = environ.get(variable, "").strip().lower()
    if text not in _SWITCHES:
        raise InputError(f"{variable}={text!r} is not true or false; set 1, or unset it")
    return _SWITCHES[text]


def _optional_switch(environ: Mapping[str, str], variable: str) -> bool | None:
    return _switch(environ, variable) if environ.get(variable, "").strip() else None


def _integer(environ: Mapping[str, str], variable: str) -> int | None:
    text = environ.get(variable, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{variable}={text!r} is not an integer; set a whole number or unset it") from None


def _count(environ: Mapping[str, str], variable: str) -> int:
    value = _integer(environ, variable) or 0
    if value < 0:
        raise InputError(f"{variable}={value} must not be negative; unset it for none")
    return value


def _at_least_one(environ: Mapping[str, str], variable: str, remedy: str) -> int | None:
    number = _integer(environ, variable)
    if number is not None and number < 1:
        raise InputError(f"{variable}={number} must be at least 1; {remedy}")
    return number


def _gibibytes(environ: Mapping[str, str], variable: str) -> float | None:
    """A size in GiB; None for 0 or unset, which both mean the default."""
    text = environ.get(variable, "").strip()
    try:
        space = float(text or 0)
    except ValueError:
        space = -1.0
    if not 0 <= space < float("inf"):
        raise InputError(f"{variable}={text!r} is not a size in GiB; set a number such as 4, or unset it")
    return space or None


def _seconds(environ: Mapping[str, str], variable: str, default: float) -> float:
    text = environ.get(variable, "").strip()
    try:
        found = float(text or default)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise InputError(f"{variable}={text!r} is not a number of seconds above 0; set one, or unset it")
    return found


def _share(environ: Mapping[str, str], variable: str) -> float | None:
    text = environ.get(variable, "").strip()
    try:
        found = float(text) if text else None
    except ValueError:
        found = -1.0
    if found is not None and not 0 <= found <= 1:
        raise InputError(f"{variable}={text!r} is not a share within 0 … 1; set one such as 0.3, or unset it")
    return found
