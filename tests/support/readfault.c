/* Fails calls that read below a folder: open, stat, list and read. Preloaded (LD_PRELOAD) into the process under test.
 *
 * readfault_arm(folder, n, times, error): the nth such call from now on (from 0), and the `times - 1` after it, fail with `error`.
 * readfault_arm("", 0, 0, 0) disarms. readfault_count() is the number of calls since. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define MAX_FILES 65536
static char folder[4096];
static atomic_long count;
static long first, times;
static int fault;
static atomic_char is_below[MAX_FILES];

void readfault_arm(const char *path, long n, long how_often, int error) {
  folder[0] = 0;
  atomic_store(&count, 0);
  first = n, times = how_often, fault = error;
  strncpy(folder, path, sizeof folder - 1);
}

long readfault_count(void) { return atomic_load(&count); }

static int hit(void) {
  long at = atomic_fetch_add(&count, 1);
  if (at < first || at >= first + times) return 0;
  errno = fault;
  return 1;
}

static int below(const char *path) { return folder[0] && path && strncmp(path, folder, strlen(folder)) == 0; }
static int file_below(int fd) { return folder[0] && fd >= 0 && fd < MAX_FILES && atomic_load(&is_below[fd]); }

#define REAL(result, name, ...)                                   \
  static result (*real)(__VA_ARGS__);                             \
  if (!real) real = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

#define WRAP(result, bad, name, condition, parameters, arguments, ...) \
  result name parameters {                                        \
    REAL(result, #name, __VA_ARGS__);                             \
    if ((condition) && hit()) return bad;                         \
    return real arguments;                                        \
  }

#define WRAP_OPEN(name)                                           \
  int name(const char *path, int flags, ...) {                    \
    REAL(int, #name, const char *, int, ...);                     \
    va_list rest;                                                 \
    va_start(rest, flags);                                        \
    mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;     \
    va_end(rest);                                                 \
    int ours = below(path);                                       \
    if (ours && hit()) return -1;                                 \
    int fd = real(path, flags, mode);                             \
    if (fd >= 0 && fd < MAX_FILES) atomic_store(&is_below[fd], ours); \
    return fd;                                                    \
  }

WRAP_OPEN(open)
WRAP_OPEN(open64)
WRAP(DIR *, NULL, opendir, below(path), (const char *path), (path), const char *)
WRAP(int, -1, stat, below(path), (const char *path, struct stat *found), (path, found), const char *, struct stat *)
WRAP(int, -1, stat64, below(path), (const char *path, struct stat64 *found), (path, found), const char *, struct stat64 *)
WRAP(int, -1, lstat, below(path), (const char *path, struct stat *found), (path, found), const char *, struct stat *)
WRAP(int, -1, lstat64, below(path), (const char *path, struct stat64 *found), (path, found), const char *, struct stat64 *)
WRAP(int, -1, fstat, file_below(fd), (int fd, struct stat *found), (fd, found), int, struct stat *)
WRAP(int, -1, fstat64, file_below(fd), (int fd, struct stat64 *found), (fd, found), int, struct stat64 *)
WRAP(ssize_t, -1, read, file_below(fd), (int fd, void *data, size_t size), (fd, data, size), int, void *, size_t)
WRAP(ssize_t, -1, preadv, file_below(fd), (int fd, const struct iovec *v, int n, off_t from), (fd, v, n, from), int, const struct iovec *, int, off_t)
WRAP(ssize_t, -1, preadv64, file_below(fd), (int fd, const struct iovec *v, int n, off64_t from), (fd, v, n, from), int, const struct iovec *, int, off64_t)
WRAP(ssize_t, -1, preadv2, file_below(fd), (int fd, const struct iovec *v, int n, off_t from, int f), (fd, v, n, from, f), int, const struct iovec *, int, off_t, int)
WRAP(ssize_t, -1, preadv64v2, file_below(fd), (int fd, const struct iovec *v, int n, off64_t from, int f), (fd, v, n, from, f), int, const struct iovec *, int, off64_t, int)
