"""Engines that are compared, each a file that runs in a process of its own (launch.py), in the Python that has it.

None imports llmc, except bundle.py; heavy imports of numpy wait for the call that needs them, since a process's first
token is timed as well. A class `Engine(model, threads, …)` answers

    about()                      {"versions": {…}, …}; a bundle's limits too
    warm()                       what must not happen within a measurement
    first_token(question)        {"text"}: the first text of a chat's answer
    decode(prompts, steps)       {"steps"}: seconds of each decode step, of prompts of equal length, in one batch
    prefill(prompt)              {"seconds"} from the prompt to its first token
    streams(prompts, tokens)     {"seconds", "tokens"}: answers of `tokens` tokens to equally long prompts, all at once
    serve(prompts, tokens, concurrency)
                                 {"seconds", "sent", "times"}: a closed loop of requests of any lengths, continuously
                                 batched; seconds from its start to each request's sending, and to each of its tokens
    logits(texts, file)          float32 [all tokens, vocabulary] after every token of every text, into a .npy file

All are greedy and continue after the end token; prompts and texts are token ids. An engine without a method is left out
of that measurement.
"""
