/* Ends a process, fails calls or holds one up, at the nth call that touches files. Preloaded (LD_PRELOAD) into the process under test.
 *
 * killpoint_arm(n, error): the nth call from now on (from 0) that changes files, wherever they are, is not made: the process gets SIGKILL
 * (error 0), or the call fails with `error`, once. Calls that only read leave the disk as the call after them finds it, so they are not
 * counted.
 *
 * killpoint_arm_below(root, n, error, times, after): every call that touches what is below `root` counts, reading ones too. From the nth on
 * `times` calls fail with `error`: not made, or with `after` made all the same. A close is always made; it fails only as the nth call itself, so
 * that two errors in a row are not one and the close after it.
 *
 * killpoint_signal(number): a thread whose call fails gets this signal first, once (with faulthandler: where it was).
 *
 * killpoint_hold(root, n): the nth call below `root` of any thread but this one waits until killpoint_release(). killpoint_held(seconds)
 * waits until a call is held and says whether one is.
 *
 * killpoint_disarm() ends it all. killpoint_count() is the number of calls since it was armed. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { KILL = 0, HOLD = -1 };     /* what `fault` may be besides an errno */
enum { NONE, BEFORE, AFTER };     /* when a call fails */
enum { READS, CHANGES, CLOSES };  /* what a call does */

static atomic_long count;
static atomic_long at = -1;
static atomic_long remaining;
static atomic_int fault;
static int when;
static char root[4096]; /* "": calls that change files, anywhere */
static pthread_t armed_by;
static sem_t held, released;
static int signalled;
static __thread int telling; /* in the handler of killpoint_signal(), whose stack is small */

static void arm(const char *below, long n, int error, long times, int after) {
  atomic_store(&at, -1);
  atomic_store(&count, 0);
  atomic_store(&remaining, times);
  atomic_store(&fault, error);
  when = after ? AFTER : BEFORE;
  snprintf(root, sizeof root, "%s", below);
  armed_by = pthread_self();
  atomic_store(&at, n);
}

void killpoint_arm(long n, int error) { arm("", n, error, 1, 0); }
void killpoint_arm_below(const char *below, long n, int error, long times, int after) { arm(below, n, error, times, after); }
void killpoint_signal(int number) { signalled = number; }
void killpoint_disarm(void) { atomic_store(&at, -1); }
long killpoint_count(void) { return atomic_load(&count); }

void killpoint_hold(const char *below, long n) {
  sem_init(&held, 0, 0);
  sem_init(&released, 0, 0);
  arm(below, n, HOLD, 1, 0);
}

int killpoint_held(double seconds) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  long nanoseconds = until.tv_nsec + (long)(seconds * 1e9);
  until.tv_sec += nanoseconds / 1000000000;
  until.tv_nsec = nanoseconds % 1000000000;
  return sem_timedwait(&held, &until) == 0;
}

void killpoint_release(void) { sem_post(&released); }

static int is_below(const char *path) {
  size_t size = strlen(root);
  return strncmp(path, root, size) == 0 && (path[size] == '/' || path[size] == 0);
}

/* Not inlined: its buffer and snprintf would overflow the alternate stack on which faulthandler writes. */
static __attribute__((noinline)) int fd_is_below(int fd) {
  char name[64], found[4096];
  int before = errno;
  snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
  long size = syscall(SYS_readlink, name, found, sizeof found - 1);
  errno = before;
  if (size < 0) return 0;
  found[size] = 0;
  return is_below(found);
}

static int fd_counts(int fd, int does) {
  if (atomic_load(&at) < 0 || telling) return 0;
  if (!root[0]) return does == CHANGES;
  return fd_is_below(fd);
}

static int path_counts(int folder, const char *path, int does) {
  if (atomic_load(&at) < 0 || !path) return 0;
  if (!root[0]) return does == CHANGES;
  return path[0] == '/' ? is_below(path) : folder != AT_FDCWD && fd_counts(folder, does);
}

static int is_file(int fd) {
  struct stat found;
  int before = errno, regular = syscall(SYS_fstat, fd, &found) == 0 && S_ISREG(found.st_mode);
  errno = before;
  return regular;
}

/* Says whether the call that has come fails, and when; sets errno for a call that fails before it is made. */
static int hit(int does) {
  long first = atomic_load(&at);
  if (first < 0) return NONE;
  if (atomic_load(&fault) == HOLD && pthread_equal(pthread_self(), armed_by)) return NONE;
  long here = atomic_fetch_add(&count, 1);
  if (here < first || (does == CLOSES && here != first) || atomic_fetch_sub(&remaining, 1) <= 0) return NONE;
  if (atomic_load(&fault) == KILL) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
  }
  if (atomic_load(&fault) == HOLD) {
    sem_post(&held);
    while (sem_wait(&released) != 0) continue;
    return NONE;
  }
  if (signalled && here == first) {
    telling = 1;
    pthread_kill(pthread_self(), signalled);
    telling = 0;
  }
  errno = atomic_load(&fault);
  return when;
}

#define REAL(result, name, ...)                                   \
  static result (*real)(__VA_ARGS__);                             \
  if (!real) real = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

/* `undo` gives back what a call that was made and then fails has got. */
#define WRAP_AS(result, failed, undo, name, does, counts, parameters, arguments, ...) \
  result name parameters {                                        \
    REAL(result, #name, __VA_ARGS__);                             \
    int fails = (counts) ? hit(does) : NONE;                      \
    if (fails == BEFORE && does != CLOSES) return failed;         \
    result got = real arguments;                                  \
    if (fails == NONE || got == failed) return got;               \
    undo;                                                         \
    errno = atomic_load(&fault);                                  \
    return failed;                                                \
  }

#define WRAP(result, name, does, counts, parameters, arguments, ...) WRAP_AS(result, -1, , name, does, counts, parameters, arguments, __VA_ARGS__)
#define WRAP_FD(result, name, does, parameters, arguments, ...) WRAP(result, name, does, fd_counts(fd, does), parameters, arguments, __VA_ARGS__)
#define WRAP_PATH(name, does, parameters, arguments, ...) WRAP(int, name, does, path_counts(AT_FDCWD, path, does), parameters, arguments, __VA_ARGS__)
#define WRAP_PATH_AT(name, does, parameters, arguments, ...) WRAP(int, name, does, path_counts(at_, path, does), parameters, arguments, __VA_ARGS__)

#define OPENED(folder, call, ...)                                 \
    va_list rest;                                                 \
    va_start(rest, flags);                                        \
    mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
    va_end(rest);                                                 \
    int does = flags & (O_CREAT | O_TRUNC) ? CHANGES : READS;     \
    int fails = path_counts(folder, path, does) ? hit(does) : NONE; \
    if (fails == BEFORE) return -1;                               \
    int got = call;                                               \
    if (fails == NONE || got < 0) return got;                     \
    syscall(SYS_close, got);                                      \
    errno = atomic_load(&fault);                                  \
    return -1

#define WRAP_OPEN(name)                                           \
  int name(const char *path, int flags, ...) {                    \
    REAL(int, #name, const char *, int, ...);                     \
    OPENED(AT_FDCWD, real(path, flags, mode));                    \
  }

#define WRAP_OPENAT(name)                                         \
  int name(int at_, const char *path, int flags, ...) {           \
    REAL(int, #name, int, const char *, int, ...);                \
    OPENED(at_, real(at_, path, flags, mode));                    \
  }

WRAP_OPEN(open)
WRAP_OPEN(open64)
WRAP_OPENAT(openat)
WRAP_OPENAT(openat64)
WRAP_FD(int, close, CLOSES, (int fd), (fd), int)

WRAP(ssize_t, write, CHANGES, is_file(fd) && fd_counts(fd, CHANGES), (int fd, const void *data, size_t size), (fd, data, size), int, const void *, size_t)
WRAP_FD(ssize_t, pwrite, CHANGES, (int fd, const void *data, size_t size, off_t from), (fd, data, size, from), int, const void *, size_t, off_t)
WRAP_FD(ssize_t, pwrite64, CHANGES, (int fd, const void *data, size_t size, off64_t from), (fd, data, size, from), int, const void *, size_t, off64_t)
WRAP_FD(ssize_t, pwritev, CHANGES, (int fd, const struct iovec *v, int n, off_t from), (fd, v, n, from), int, const struct iovec *, int, off_t)
WRAP_FD(ssize_t, pwritev64, CHANGES, (int fd, const struct iovec *v, int n, off64_t from), (fd, v, n, from), int, const struct iovec *, int, off64_t)
WRAP_FD(ssize_t, pwritev2, CHANGES, (int fd, const struct iovec *v, int n, off_t from, int f), (fd, v, n, from, f), int, const struct iovec *, int, off_t, int)
WRAP_FD(ssize_t, pwritev64v2, CHANGES, (int fd, const struct iovec *v, int n, off64_t from, int f), (fd, v, n, from, f), int, const struct iovec *, int, off64_t, int)
WRAP_FD(int, fsync, CHANGES, (int fd), (fd), int)
WRAP_FD(int, fdatasync, CHANGES, (int fd), (fd), int)
WRAP_FD(int, ftruncate, CHANGES, (int fd, off_t size), (fd, size), int, off_t)
WRAP_FD(int, ftruncate64, CHANGES, (int fd, off64_t size), (fd, size), int, off64_t)
WRAP_FD(int, flock, CHANGES, (int fd, int what), (fd, what), int, int)
WRAP(int, link, CHANGES, path_counts(AT_FDCWD, to, CHANGES), (const char *from, const char *to), (from, to), const char *, const char *)
WRAP(int, linkat, CHANGES, path_counts(b, to, CHANGES), (int a, const char *from, int b, const char *to, int f), (a, from, b, to, f), int, const char *, int, const char *, int)
WRAP(int, rename, CHANGES, path_counts(AT_FDCWD, to, CHANGES), (const char *from, const char *to), (from, to), const char *, const char *)
WRAP(int, renameat, CHANGES, path_counts(b, to, CHANGES), (int a, const char *from, int b, const char *to), (a, from, b, to), int, const char *, int, const char *)
WRAP_PATH(unlink, CHANGES, (const char *path), (path), const char *)
WRAP_PATH_AT(unlinkat, CHANGES, (int at_, const char *path, int f), (at_, path, f), int, const char *, int)
WRAP_PATH(mkdir, CHANGES, (const char *path, mode_t mode), (path, mode), const char *, mode_t)
WRAP_PATH_AT(mkdirat, CHANGES, (int at_, const char *path, mode_t mode), (at_, path, mode), int, const char *, mode_t)
WRAP_PATH(rmdir, CHANGES, (const char *path), (path), const char *)

WRAP_FD(ssize_t, read, READS, (int fd, void *data, size_t size), (fd, data, size), int, void *, size_t)
WRAP_FD(ssize_t, pread, READS, (int fd, void *data, size_t size, off_t from), (fd, data, size, from), int, void *, size_t, off_t)
WRAP_FD(ssize_t, pread64, READS, (int fd, void *data, size_t size, off64_t from), (fd, data, size, from), int, void *, size_t, off64_t)
WRAP_FD(ssize_t, preadv, READS, (int fd, const struct iovec *v, int n, off_t from), (fd, v, n, from), int, const struct iovec *, int, off_t)
WRAP_FD(ssize_t, preadv64, READS, (int fd, const struct iovec *v, int n, off64_t from), (fd, v, n, from), int, const struct iovec *, int, off64_t)
WRAP_FD(ssize_t, preadv2, READS, (int fd, const struct iovec *v, int n, off_t from, int f), (fd, v, n, from, f), int, const struct iovec *, int, off_t, int)
WRAP_FD(ssize_t, preadv64v2, READS, (int fd, const struct iovec *v, int n, off64_t from, int f), (fd, v, n, from, f), int, const struct iovec *, int, off64_t, int)
WRAP_FD(off64_t, lseek64, READS, (int fd, off64_t to, int whence), (fd, to, whence), int, off64_t, int)
WRAP_FD(int, fstat, READS, (int fd, struct stat *found), (fd, found), int, struct stat *)
WRAP_FD(int, fstat64, READS, (int fd, struct stat64 *found), (fd, found), int, struct stat64 *)
WRAP_PATH(stat, READS, (const char *path, struct stat *found), (path, found), const char *, struct stat *)
WRAP_PATH(stat64, READS, (const char *path, struct stat64 *found), (path, found), const char *, struct stat64 *)
WRAP_PATH(lstat, READS, (const char *path, struct stat *found), (path, found), const char *, struct stat *)
WRAP_PATH(lstat64, READS, (const char *path, struct stat64 *found), (path, found), const char *, struct stat64 *)
WRAP_PATH_AT(fstatat, READS, (int at_, const char *path, struct stat *found, int f), (at_, path, found, f), int, const char *, struct stat *, int)
WRAP_PATH_AT(fstatat64, READS, (int at_, const char *path, struct stat64 *found, int f), (at_, path, found, f), int, const char *, struct stat64 *, int)
WRAP_PATH(statvfs, READS, (const char *path, struct statvfs *found), (path, found), const char *, struct statvfs *)
WRAP_PATH(statvfs64, READS, (const char *path, struct statvfs64 *found), (path, found), const char *, struct statvfs64 *)
WRAP_PATH(access, READS, (const char *path, int how), (path, how), const char *, int)
WRAP_PATH_AT(utimensat, READS, (int at_, const char *path, const struct timespec t[2], int f), (at_, path, t, f), int, const char *, const struct timespec *, int)
WRAP(ssize_t, readlink, READS, path_counts(AT_FDCWD, path, READS), (const char *path, char *to, size_t size), (path, to, size), const char *, char *, size_t)
WRAP_AS(DIR *, NULL, closedir(got), opendir, READS, path_counts(AT_FDCWD, path, READS), (const char *path), (path), const char *)
WRAP_AS(struct dirent *, NULL, , readdir, READS, fd_counts(dirfd(folder), READS), (DIR *folder), (folder), DIR *)
WRAP_AS(struct dirent64 *, NULL, , readdir64, READS, fd_counts(dirfd(folder), READS), (DIR *folder), (folder), DIR *)
