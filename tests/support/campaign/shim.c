/* Loaded before libc (LD_PRELOAD): calls below one folder fail from a moment on.
 *
 * Does nothing until a process asks for it, by `shim_fail`; what is forked from there inherits it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { OPEN = 1, WRITE = 2, FSYNC = 4, RENAME = 8 };

static char root[PATH_MAX];
static size_t length;
static int kinds, error_number;
static long first, last;
static atomic_long count, failed;

/* Calls of `which` kinds below `folder` get a number from 1 on; those from `from` to `to` fail. 0: none does. */
void shim_fail(const char *folder, int which, long from, long to, int number) {
    strncpy(root, folder, sizeof root - 1);
    length = strlen(root);
    kinds = which, first = from, last = to, error_number = number;
    count = failed = 0;
}
long shim_count(void) { return count; }
long shim_failed(void) { return failed; }

static int below(const char *path) {
    char full[PATH_MAX];
    if (!length) return 0;
    if (path[0] != '/') {
        if (!getcwd(full, sizeof full)) return 0;
        size_t used = strlen(full);
        snprintf(full + used, sizeof full - used, "/%s", path);
        path = full;
    }
    return !strncmp(path, root, length) && (path[length] == '/' || !path[length]);
}
static int below_fd(int fd) {
    char name[64], path[PATH_MAX];
    if (!length) return 0;
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(name, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return below(path);
}
static int fails(int kind) {
    if (!(kinds & kind)) return 0;
    long number = ++count;
    if (!first || number < first || number > last) return 0;
    ++failed;
    errno = error_number;
    return 1;
}

#define REAL(name) static __typeof__(name) *real; if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

#define OPENING(name)                                                    \
    int name(const char *path, int flags, ...) {                         \
        REAL(name);                                                      \
        va_list args; va_start(args, flags);                             \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(args, mode_t) : 0; \
        va_end(args);                                                    \
        return below(path) && fails(OPEN) ? -1 : real(path, flags, mode); \
    }
OPENING(open)
OPENING(open64)

/* Of a name in an opened folder. */
static int below_at(int folder, const char *path) {
    return path[0] == '/' || folder == AT_FDCWD ? below(path) : below_fd(folder);
}
#define OPENING_AT(name)                                                 \
    int name(int folder, const char *path, int flags, ...) {             \
        REAL(name);                                                      \
        va_list args; va_start(args, flags);                             \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(args, mode_t) : 0; \
        va_end(args);                                                    \
        return below_at(folder, path) && fails(OPEN) ? -1 : real(folder, path, flags, mode); \
    }
OPENING_AT(openat)
OPENING_AT(openat64)

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    return below_fd(fd) && fails(WRITE) ? -1 : real(fd, data, size);
}
int fsync(int fd) {
    REAL(fsync);
    return below_fd(fd) && fails(FSYNC) ? -1 : real(fd);
}
int rename(const char *from, const char *to) {
    REAL(rename);
    return below(to) && fails(RENAME) ? -1 : real(from, to);
}
int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    REAL(renameat);
    return below_at(to_folder, to) && fails(RENAME) ? -1 : real(from_folder, from, to_folder, to);
}
