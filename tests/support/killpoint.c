/* Ends a process, or fails a call, right before the nth call that changes files. Preloaded (LD_PRELOAD) into the process under test.
 *
 * killpoint_arm(n, error): the nth call from now on (from 0) is not made: the process gets SIGKILL (error 0), or the call fails with `error`,
 * once. killpoint_arm(-1, 0) disarms. killpoint_count() is the number of calls since. Calls that only read leave the disk as the call
 * after them finds it, so they are not counted. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long count;
static atomic_long at = -1;
static atomic_int fault;

void killpoint_arm(long n, int error) {
  atomic_store(&at, -1);
  atomic_store(&count, 0);
  atomic_store(&fault, error);
  atomic_store(&at, n);
}

long killpoint_count(void) { return atomic_load(&count); }

static int hit(void) {
  if (atomic_load(&at) < 0 || atomic_fetch_add(&count, 1) != atomic_load(&at)) return 0;
  if (atomic_load(&fault) == 0) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
  }
  errno = atomic_load(&fault);
  return 1;
}

static int is_file(int fd) {
  struct stat found;
  int before = errno, regular = fstat(fd, &found) == 0 && S_ISREG(found.st_mode);
  errno = before;
  return regular;
}

#define REAL(result, name, ...)                                   \
  static result (*real)(__VA_ARGS__);                             \
  if (!real) real = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

#define WRAP(result, name, condition, parameters, arguments, ...) \
  result name parameters {                                        \
    REAL(result, #name, __VA_ARGS__);                             \
    if ((condition) && hit()) return -1;                          \
    return real arguments;                                        \
  }

#define WRAP_OPEN(name)                                           \
  int name(const char *path, int flags, ...) {                    \
    REAL(int, #name, const char *, int, ...);                     \
    va_list rest;                                                 \
    va_start(rest, flags);                                        \
    mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;     \
    va_end(rest);                                                 \
    if ((flags & (O_CREAT | O_TRUNC)) && hit()) return -1;        \
    return real(path, flags, mode);                               \
  }

WRAP_OPEN(open)
WRAP_OPEN(open64)
WRAP(ssize_t, write, is_file(fd), (int fd, const void *data, size_t size), (fd, data, size), int, const void *, size_t)
WRAP(ssize_t, pwrite, 1, (int fd, const void *data, size_t size, off_t from), (fd, data, size, from), int, const void *, size_t, off_t)
WRAP(ssize_t, pwrite64, 1, (int fd, const void *data, size_t size, off64_t from), (fd, data, size, from), int, const void *, size_t, off64_t)
WRAP(ssize_t, pwritev, 1, (int fd, const struct iovec *v, int n, off_t from), (fd, v, n, from), int, const struct iovec *, int, off_t)
WRAP(ssize_t, pwritev64, 1, (int fd, const struct iovec *v, int n, off64_t from), (fd, v, n, from), int, const struct iovec *, int, off64_t)
WRAP(ssize_t, pwritev2, 1, (int fd, const struct iovec *v, int n, off_t from, int f), (fd, v, n, from, f), int, const struct iovec *, int, off_t, int)
WRAP(ssize_t, pwritev64v2, 1, (int fd, const struct iovec *v, int n, off64_t from, int f), (fd, v, n, from, f), int, const struct iovec *, int, off64_t, int)
WRAP(int, fsync, 1, (int fd), (fd), int)
WRAP(int, fdatasync, 1, (int fd), (fd), int)
WRAP(int, ftruncate, 1, (int fd, off_t size), (fd, size), int, off_t)
WRAP(int, ftruncate64, 1, (int fd, off64_t size), (fd, size), int, off64_t)
WRAP(int, flock, 1, (int fd, int what), (fd, what), int, int)
WRAP(int, link, 1, (const char *from, const char *to), (from, to), const char *, const char *)
WRAP(int, linkat, 1, (int a, const char *from, int b, const char *to, int f), (a, from, b, to, f), int, const char *, int, const char *, int)
WRAP(int, rename, 1, (const char *from, const char *to), (from, to), const char *, const char *)
WRAP(int, renameat, 1, (int a, const char *from, int b, const char *to), (a, from, b, to), int, const char *, int, const char *)
WRAP(int, unlink, 1, (const char *path), (path), const char *)
WRAP(int, unlinkat, 1, (int at_, const char *path, int f), (at_, path, f), int, const char *, int)
WRAP(int, mkdir, 1, (const char *path, mode_t mode), (path, mode), const char *, mode_t)
WRAP(int, mkdirat, 1, (int at_, const char *path, mode_t mode), (at_, path, mode), int, const char *, mode_t)
WRAP(int, rmdir, 1, (const char *path), (path), const char *)
