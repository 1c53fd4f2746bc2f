"""Process start to first token with onnxruntime-genai: prints the token's text and exits."""

import json
import sys

import onnxruntime_genai as og

config = og.Config(sys.argv[1])
config.overlay('{"model": {"decoder": {"session_options": {"intra_op_num_threads": 2}}}}')
model = og.Model(config)
tokenizer = og.Tokenizer(model)
messages = json.dumps([{"role": "user", "content": sys.argv[2]}])
tokens = tokenizer.encode(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
params = og.GeneratorParams(model)
params.set_search_options(max_length=256, do_sample=False)
generator = og.Generator(model, params)
generator.append_tokens(tokens)
stream = tokenizer.create_stream()
text = ""
while not text:
    generator.generate_next_token()
    text = stream.decode(generator.get_next_tokens()[0])
print(text, flush=True)
sys.stdin.readline()
