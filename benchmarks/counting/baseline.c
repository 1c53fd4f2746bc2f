/* llama.cpp alone, as steps.py does it: a prompt twice, and twice as many decode steps.

   baseline run FILE.gguf TOKENS STEPS
   baseline quantise IN.gguf OUT.gguf KIND (the number of a llama_ftype) */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "llama.h"

static void quiet(enum ggml_log_level level, const char *text, void *given) {
    (void)given;
    if (level == GGML_LOG_LEVEL_ERROR)
        fputs(text, stderr);
}

static void decode(struct llama_context *context, llama_token *tokens, int count) {
    if (llama_decode(context, llama_batch_get_one(tokens, count)) != 0) {
        fputs("llama_decode failed\n", stderr);
        exit(1);
    }
}

static int run(const char *file, int count, int steps) {
    struct llama_model *model = llama_model_load_from_file(file, llama_model_default_params());
    if (model == NULL)
        return 1;
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = 1024;
    params.n_threads = params.n_threads_batch = 1;
    struct llama_context *context = llama_init_from_model(model, params);
    llama_token *tokens = malloc((count + 2 * steps) * sizeof *tokens);
    if (context == NULL || tokens == NULL)
        return 1;
    for (int i = 0; i < count + 2 * steps; i++)
        tokens[i] = 1 + i * 97; /* as steps.py */
    for (int i = 0; i < 2; i++) {
        llama_memory_clear(llama_get_memory(context), true);
        decode(context, tokens, count);
        getpriority(PRIO_PROCESS, 0);
    }
    for (int i = 0; i < 2 * steps; i++) {
        decode(context, tokens + count + i, 1);
        if ((i + 1) % steps == 0)
            getpriority(PRIO_PROCESS, 0);
    }
    const float *logits = llama_get_logits_ith(context, -1);
    int best = 0;
    for (int i = 0; i < llama_vocab_n_tokens(llama_model_get_vocab(model)); i++)
        best = logits[i] > logits[best] ? i : best;
    printf("%d\n", best);
    return 0;
}

int main(int count, char **given) {
    llama_log_set(quiet, NULL);
    if (count == 5 && strcmp(given[1], "run") == 0)
        return run(given[2], atoi(given[3]), atoi(given[4]));
    if (count == 5 && strcmp(given[1], "quantise") == 0) {
        struct llama_model_quantize_params params = llama_model_quantize_default_params();
        params.ftype = atoi(given[4]);
        params.allow_requantize = true;
        params.nthread = 1;
        return llama_model_quantize(given[2], given[3], &params) != 0;
    }
    return 2;
}
