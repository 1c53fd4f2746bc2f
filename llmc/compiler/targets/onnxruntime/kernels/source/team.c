/* A thread pool whose threads spin while they wait for work. See team.h.

A decode step has hundreds of short parallel regions, so the overhead of a region counts hundreds of times per step. The
caller publishes a region with one store to each member's part and one to `region`. A member first claims jobs of its
own part, which are the same ones in each step, and then unclaimed jobs of the others. Hence the caller waits only for
threads that do work. Threads that sleep, that the system has preempted, or that a forked child lacks cause no delay.

A waiting thread spins. After YIELDING it also yields the CPU between checks. After SLEEPING without work it sleeps.

A claim is one compare-and-swap of a word that contains the region's number. Thus no thread can claim jobs of a region
that is over. A thread reads the region's description only after its claim succeeds. */
#include "team.h"

#include <stdatomic.h>

/* The functions of Linux's C library that this file uses, since the build has no headers. They are the same in glibc
and musl. */
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
  _Alignas(64) _Atomic uint64_t part; /* region · 2³² + claims taken · 2¹⁶ + claims */
  _Alignas(64) _Atomic uint64_t done; /* region · 2³² + claims done by this member, in any part */
} Member;

static Member members[MAX_THREADS];
static struct {
  _Alignas(64) _Atomic uint32_t region; /* number of the current region */
  _Atomic uint32_t parts, asleep, ending;
  _Alignas(64) void (*job)(void *, size_t);
  void *data;
  size_t count, each /* jobs of a claim */, claims;
  _Alignas(64) atomic_flag busy; /* its holder may change the fields that are not atomic */
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

/* Pause briefly. Every PAUSES calls, returns the nanoseconds waited so far; otherwise 0. */
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

/* Run the unclaimed jobs of a region, this member's part first. Returns the number of claims. */
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

/* Wait for a region after `seen`, and return its number. */
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

/* Set the number of threads that jobs run on, including the caller's; 0 means the session's threads. Replaces the
previous team. Returns the number of threads, which is smaller if the system refuses to create more. */
__attribute__((visibility("default"))) uint32_t SetThreads(uint32_t threads) {
  const int process = getpid();
  if (team.process != process) { /* a forked child has none of its parent's threads */
    team.process = process, team.size = 0;
    atomic_store(&team.asleep, 0);
    atomic_flag_clear(&team.busy);
  }
  while (atomic_flag_test_and_set_explicit(&team.busy, memory_order_acquire)) sched_yield();
  if (team.size > 1) stop();
  team.size = 1;
  Signals all, before;
  for (int i = 0; i < 16; i++) all.words[i] = ~0ull;
  pthread_sigmask(SIG_SETMASK, &all, &before); /* the process's other threads handle signals */
  while (team.size < threads && team.size < MAX_THREADS &&
         !pthread_create(team.threads + team.size, NULL, member, (void *)(uintptr_t)team.size))
    team.size++;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  const uint32_t size = team.size;
  atomic_flag_clear_explicit(&team.busy, memory_order_release);
  return size;
}
