/* See team.h. A team of threads of the library's own, which wait for work awake.

A decode step has hundreds of short regions of parallel work: what a region costs beside its jobs, a step pays hundreds of
times. A region is offered by a store to each member's part and one to `region`; a member takes jobs of its own part
first, which are the same ones in every step, then those that others have not come to. So whoever calls waits for those who
work alone: threads that sleep, are held up by the system, or are not there in a forked child, do not delay it. Who waits
spins, after YIELDING lets others have the CPU in between, and after SLEEPING, where there is no work, sleeps.

A claim is one compare-and-swap of a word that holds the region's number, so that nobody takes from a region that is over;
what the region is about is read behind it. */
#include "team.h"

#include <stdatomic.h>

/* The part of Linux's C library that this file uses, of any version and make: no headers are there to compile with. */
typedef struct {
  int64_t seconds, nanoseconds;
} Time;
typedef struct {
  uint64_t words[16];
} Signals;
typedef unsigned long Thread;
extern int pthread_create(Thread *, const void *attributes, void *(*)(void *), void *);
extern int pthread_join(Thread, void **);
extern int pthread_sigmask(int how, const Signals *, Signals *before);
extern int clock_gettime(int clock, Time *);
extern int sched_yield(void);
extern int getpid(void);
extern long syscall(long number, ...);
enum { CLOCK_MONOTONIC = 1, SIG_SETMASK = 2, FUTEX_WAIT_PRIVATE = 128, FUTEX_WAKE_PRIVATE = 129 };
#ifdef __x86_64__
enum { FUTEX = 202 };
#else
enum { FUTEX = 98 };
#endif

enum { MAX_THREADS = 256, MAX_CLAIMS = 0xFFFF /* of a part */ };
enum { PAUSES = 32, YIELDING = 100 * 1000, SLEEPING = 1000 * 1000 /* nanoseconds */ };

typedef struct {
  _Alignas(64) _Atomic uint64_t part; /* the region · 2³² + claims taken · 2¹⁶ + claims */
  _Alignas(64) _Atomic uint64_t done; /* the region · 2³² + claims done by this member, of any part */
} Member;

static Member members[MAX_THREADS];
static struct {
  _Alignas(64) _Atomic uint32_t region; /* counts them */
  _Atomic uint32_t parts, asleep, ending;
  _Alignas(64) void (*job)(void *, size_t);
  void *data;
  size_t count, each /* jobs of a claim */, claims;
  _Alignas(64) atomic_flag busy; /* who has it may change what is not atomic */
  _Atomic uint32_t size;
  int process;
  Thread threads[MAX_THREADS];
} team = {.busy = ATOMIC_FLAG_INIT};

static int64_t nanoseconds(void) {
  Time now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.seconds * 1000000000 + now.nanoseconds;
}

typedef struct {
  uint32_t pauses;
  int64_t since;
} Wait;

/* Wait a moment. Returns for how long by now, in nanoseconds, now and then, and else 0. */
static int64_t waited(Wait *wait) {
#ifdef __x86_64__
  __builtin_ia32_pause();
#else
  __asm__ volatile("isb");
#endif
  if (++wait->pauses % PAUSES) return 0;
  const int64_t now = nanoseconds();
  if (!wait->since) wait->since = now;
  if (now - wait->since > YIELDING) sched_yield();
  return now - wait->since;
}

static int claim(Member *of, uint32_t region, size_t *at) {
  uint64_t part = atomic_load_explicit(&of->part, memory_order_acquire);
  while (part >> 32 == region && (uint16_t)(part >> 16) < (uint16_t)part)
    if (atomic_compare_exchange_weak_explicit(&of->part, &part, part + (1 << 16), memory_order_acq_rel,
                                              memory_order_acquire))
      return *at = (uint16_t)(part >> 16), 1;
  return 0;
}

static size_t part_at(uint32_t part, uint32_t parts) { return team.claims * part / parts; }

/* Do what is left of a region, one's own part first. Returns how many claims. */
static uint32_t work_on(uint32_t region, uint32_t own) {
  const uint32_t parts = atomic_load_explicit(&team.parts, memory_order_relaxed);
  uint32_t claimed = 0;
  for (uint32_t i = 0; i < parts && own < parts; i++) {
    const uint32_t part = own + i < parts ? own + i : own + i - parts;
    for (size_t at; claim(members + part, region, &at); claimed++) {
      at += part_at(part, atomic_load_explicit(&team.parts, memory_order_relaxed));
      for (size_t n = at * team.each; n < team.count && n < (at + 1) * team.each; n++) team.job(team.data, n);
    }
  }
  return claimed;
}

/* The number of a region after `seen`, once there is one. */
static uint32_t region_after(uint32_t seen) {
  for (Wait wait = {0};;) {
    const uint32_t now = atomic_load_explicit(&team.region, memory_order_acquire);
    if (now != seen) return now;
    if (waited(&wait) < SLEEPING) continue;
    atomic_fetch_add(&team.asleep, 1);
    syscall(FUTEX, &team.region, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&team.asleep, 1);
    wait = (Wait){0};
  }
}

static void *member(void *at) {
  const uint32_t own = (uint32_t)(uintptr_t)at;
  for (uint32_t region = 0;;) {
    region = region_after(region);
    if (atomic_load_explicit(&team.ending, memory_order_relaxed)) return NULL;
    const uint32_t claimed = work_on(region, own);
    if (claimed) atomic_store_explicit(&members[own].done, (uint64_t)region << 32 | claimed, memory_order_release);
  }
}

static uint32_t next_region(void) {
  const uint32_t region = atomic_load_explicit(&team.region, memory_order_relaxed) + 1;
  atomic_store(&team.region, region);
  if (atomic_load(&team.asleep)) syscall(FUTEX, &team.region, FUTEX_WAKE_PRIVATE, MAX_THREADS, NULL, NULL, 0);
  return region;
}

static void run(size_t count, void (*job)(void *, size_t), void *data) {
  const uint32_t parts = count < team.size ? (uint32_t)count : team.size;
  const uint64_t region = (uint64_t)(atomic_load_explicit(&team.region, memory_order_relaxed) + 1) << 32;
  team.job = job, team.data = data, team.count = count;
  team.each = 1 + (count - 1) / ((size_t)parts * MAX_CLAIMS);
  team.claims = 1 + (count - 1) / team.each;
  for (uint32_t i = 0; i < parts; i++)
    atomic_store_explicit(&members[i].part, region | (part_at(i + 1, parts) - part_at(i, parts)), memory_order_release);
  atomic_store_explicit(&team.parts, parts, memory_order_relaxed);
  const size_t own = work_on(next_region(), 0);
  for (Wait wait = {0};; waited(&wait)) {
    size_t done = own;
    for (uint32_t i = 1; i < parts; i++) {
      const uint64_t theirs = atomic_load_explicit(&members[i].done, memory_order_acquire);
      if ((theirs ^ region) >> 32 == 0) done += (uint32_t)theirs;
    }
    if (done == team.claims) return;
  }
}

Status *parallel(Api api, const Context *context, size_t count, void (*job)(void *, size_t), void *data) {
  if (count == 1) {
    job(data, 0);
    return NULL;
  }
  if (!count || atomic_flag_test_and_set_explicit(&team.busy, memory_order_acquire))
    return session_parallel(api, context, count, job, data);
  const int formed = team.size > 1;
  if (formed) run(count, job, data);
  atomic_flag_clear_explicit(&team.busy, memory_order_release);
  return formed ? NULL : session_parallel(api, context, count, job, data);
}

int64_t team_size(void) { return atomic_load_explicit(&team.size, memory_order_relaxed); }

static void stop(void) {
  atomic_store_explicit(&team.ending, 1, memory_order_relaxed);
  next_region();
  for (uint32_t i = 1; i < team.size; i++) pthread_join(team.threads[i], NULL);
  atomic_store_explicit(&team.ending, 0, memory_order_relaxed);
}

/* Let jobs have so many threads, the caller's among them, in the place of those they had: 0 for the session's. Returns how
many they have, fewer where the system grants no more. */
__attribute__((visibility("default"))) uint32_t SetThreads(uint32_t threads) {
  const int process = getpid();
  if (team.process != process) { /* a child forked from whoever had a team, which has none of its threads */
    team.process = process, team.size = 0;
    atomic_store(&team.asleep, 0);
    atomic_flag_clear(&team.busy);
  }
  while (atomic_flag_test_and_set_explicit(&team.busy, memory_order_acquire)) sched_yield();
  if (team.size > 1) stop();
  team.size = 1;
  Signals all, before;
  for (int i = 0; i < 16; i++) all.words[i] = ~0ull;
  pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the process's other threads */
  while (team.size < threads && team.size < MAX_THREADS &&
         !pthread_create(team.threads + team.size, NULL, member, (void *)(uintptr_t)team.size))
    team.size++;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  const uint32_t size = team.size;
  atomic_flag_clear_explicit(&team.busy, memory_order_release);
  return size;
}
