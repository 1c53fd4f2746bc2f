"""CodeGen: GPT-J's layers with queries, values and keys in one tensor, in four parts."""

from __future__ import annotations

from dataclasses import replace

from llmc.compiler.architectures import gptj
from llmc.compiler.architectures.shared.names import with_biases
from llmc.compiler.architectures.shared.sharding import rules

FAMILY = replace(
    gptj.FAMILY,
    model_class="CodeGenForCausalLM",
    layer=lambda config: [
        *with_biases("ln_1", "mlp.fc_in", "mlp.fc_out"), "attn.qkv_proj.weight", "attn.out_proj.weight",
    ],
    computed=(".attn.causal_mask", ".attn.bias", ".attn.masked_bias"),
    sharding=rules(gptj.NAMES, output=r"attn\.out_proj", up=r"mlp\.fc_in", down=r"mlp\.fc_out"),
)  # fmt: skip
