"""A Llama in numpy, float32, one sequence with its cache; and tensors as bytes."""

import json
import struct

import numpy as np


def load_safetensors(folder):
    """Tensors of every *.safetensors in `folder`, by name, float32."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        for name, about in json.loads(data[8 : 8 + length]).items():
            if name == "__metadata__":
                continue
            start, end = about["data_offsets"]
            raw = data[8 + length + start : 8 + length + end]
            found[name] = np.frombuffer(raw, np.float32).reshape(about["shape"])
    return found


def pack(tensors):
    """All tensors as one file."""
    head = json.dumps([[name, tensor.shape] for name, tensor in sorted(tensors.items())]).encode()
    body = b"".join(np.ascontiguousarray(tensor).tobytes() for _, tensor in sorted(tensors.items()))
    return struct.pack("<Q", len(head)) + head + body


def unpack(data):
    """The tensors of `pack`."""
    (length,) = struct.unpack("<Q", data[:8])
    found, at = {}, 8 + length
    for name, shape in json.loads(data[8:at]):
        count = int(np.prod(shape))
        found[name] = np.frombuffer(data, np.float32, count, at).reshape(shape)
        at += 4 * count
    return found


class Llama:
    def __init__(self, config, tensors):
        self.c, self.t = config, tensors
        self.heads, self.kv = config["num_attention_heads"], config["num_key_value_heads"]
        self.size = config.get("head_dim") or config["hidden_size"] // self.heads
        rope = config.get("rope_parameters") or config
        self.rates = rope.get("rope_theta", 10000.0) ** (-np.arange(0, self.size, 2) / self.size)
        self.cache = [[] for _ in range(config["num_hidden_layers"])]

    def logits(self, token):
        """The logits after one more token."""
        position = len(self.cache[0])
        x = self.t["model.embed_tokens.weight"][token]
        for i, cached in enumerate(self.cache):
            layer = f"model.layers.{i}."
            h = self._norm(x, layer + "input_layernorm")
            q, k, v = (self.t[f"{layer}self_attn.{p}_proj.weight"] @ h for p in "qkv")
            q, k = (self._turned(a.reshape(-1, self.size), position) for a in (q, k))
            cached.append((k, v.reshape(-1, self.size)))
            keys, values = (np.stack(a).repeat(self.heads // self.kv, 1) for a in zip(*cached, strict=True))
            scores = np.einsum("hd,nhd->hn", q, keys) / np.sqrt(self.size)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            mixed = np.einsum("hn,nhd->hd", weights / weights.sum(1, keepdims=True), values)
            x = x + self.t[layer + "self_attn.o_proj.weight"] @ mixed.reshape(-1)
            h = self._norm(x, layer + "post_attention_layernorm")
            gate, up = (self.t[f"{layer}mlp.{p}_proj.weight"] @ h for p in ("gate", "up"))
            x = x + self.t[layer + "mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        head = self.t.get("lm_head.weight", self.t["model.embed_tokens.weight"])
        return head @ self._norm(x, "model.norm")

    def _norm(self, x, name):
        return self.t[name + ".weight"] * x / np.sqrt((x * x).mean() + self.c["rms_norm_eps"])

    def _turned(self, x, position):
        angle = np.concatenate([position * self.rates] * 2)
        half = self.size // 2
        return x * np.cos(angle) + np.concatenate([-x[:, half:], x[:, :half]], 1) * np.sin(angle)


def choose(logits, seen, do_sample, top_p, top_k, temperature, repetition_penalty, random):
    """As Hugging Face's generate: penalty, temperature, top_k, top_p."""
    logits = logits.copy()
    for token in set(seen):
        logits[token] = logits[token] / repetition_penalty if logits[token] > 0 else logits[token] * repetition_penalty
    if not do_sample:
        return int(logits.argmax())
    order = np.argsort(-logits / temperature)[: max(1, top_k)]
    weights = np.exp((logits[order] - logits[order[0]]) / temperature)
    weights /= weights.sum()
    kept = max(1, int(np.searchsorted(np.cumsum(weights), top_p)) + 1)
    return int(random.choice(order[:kept], p=weights[:kept] / weights[:kept].sum()))
