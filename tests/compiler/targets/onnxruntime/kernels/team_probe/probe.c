/* A team by itself: how often each of `count` jobs was run, over regions one after the other. */
#include <stdatomic.h>

#include "team.h"

static Status *on_session(const Context *context, void (*job)(void *, size_t), size_t count, size_t batch, void *data) {
  (void)batch;
  ++*(int64_t *)context;
  for (size_t i = 0; i < count; i++) job(data, i);
  return NULL;
}

static void count_it(void *data, size_t at) { atomic_fetch_add_explicit((_Atomic uint32_t *)data + at, 1, memory_order_relaxed); }

/* Run regions of `counts` jobs each, over the same counters. Returns how many of them the session's threads ran. */
__attribute__((visibility("default"))) int64_t Regions(uint32_t *counters, const int64_t *counts, int64_t regions) {
  static void (*api[300])(void);
  api[PARALLEL_FOR] = (void (*)(void))on_session;
  int64_t by_session = 0;
  for (int64_t i = 0; i < regions; i++) parallel((Api)api, &by_session, (size_t)counts[i], count_it, counters);
  return by_session;
}
