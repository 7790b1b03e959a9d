// The truth server's command line, and how it settles on its core.
#pragma once

#include <sched.h>
#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace truth {

inline constexpr const char* HELP =
    "usage: truth_server [options]\n"
    "  --port N           0: a free one (default)\n"
    "  --log PATH         where the binary log goes at the end; without it none is kept\n"
    "  --ttft-ms X        from the receipt of a request (or its slot) to its first token (default 100)\n"
    "  --gap-ms X         from one token's deadline to the next (default 20)\n"
    "  --instant          the same as --ttft-ms 0 --gap-ms 0\n"
    "  --pattern P        constant | lognormal | stall\n"
    "  --sigma X          of lognormal gaps; their mean stays gap-ms (default 0.5)\n"
    "  --stall-every K    with stall: every K-th gap is longer (default 32)\n"
    "  --stall-ms X       by this much (default 300)\n"
    "  --slots N          at most N requests in service, the others wait in order; 0: no limit (default)\n"
    "  --error-every K    every K-th request gets HTTP 500\n"
    "  --abort-every K    every K-th answer breaks off with a reset after half of its tokens\n"
    "  --late-head        headers leave with the first token, not at once\n"
    "  --seed N           of lognormal gaps, with the request's number\n"
    "  --core N           run on this core only\n"
    "  --realtime         go before every ordinary process, where that is permitted\n"
    "  --exit-with-stdin  end when standard input ends\n";

struct Options {
    int port = 0, slots = 0, error_every = 0, abort_every = 0, core = -1;
    int stall_every = 32;
    double ttft_ms = 100, gap_ms = 20, sigma = 0.5, stall_ms = 300;
    unsigned long seed = 0;
    bool late_head = false, exit_with_stdin = false, realtime = false;
    std::string log, pattern = "constant";
};

[[noreturn]] inline void fail(const std::string& message) {
    fprintf(stderr, "truth_server: %s\n", message.c_str());
    exit(2);
}

inline double positive(const std::string& name, const char* value) {
    char* end = nullptr;
    const double number = value ? strtod(value, &end) : -1;
    if (!value || end == value || *end || number < 0)
        fail(name + (value ? " " + std::string(value) : "") + ": needs a number of 0 or more");
    return number;
}

inline Options read_options(int argc, char** argv) {
    Options o;
    for (int k = 1; k < argc; ++k) {
        const std::string name = argv[k];
        if (name == "--help" || name == "-h") {
            fputs(HELP, stdout);
            exit(0);
        }
        if (name == "--instant") { o.ttft_ms = o.gap_ms = 0; continue; }
        if (name == "--realtime") { o.realtime = true; continue; }
        if (name == "--late-head") { o.late_head = true; continue; }
        if (name == "--exit-with-stdin") { o.exit_with_stdin = true; continue; }
        const char* value = ++k < argc ? argv[k] : nullptr;
        auto whole = [&] { return int(positive(name, value)); };
        if (name == "--port") o.port = whole();
        else if (name == "--log" && value) o.log = value;
        else if (name == "--ttft-ms") o.ttft_ms = positive(name, value);
        else if (name == "--gap-ms") o.gap_ms = positive(name, value);
        else if (name == "--pattern" && value) o.pattern = value;
        else if (name == "--sigma") o.sigma = positive(name, value);
        else if (name == "--stall-every") o.stall_every = whole();
        else if (name == "--stall-ms") o.stall_ms = positive(name, value);
        else if (name == "--slots") o.slots = whole();
        else if (name == "--error-every") o.error_every = whole();
        else if (name == "--abort-every") o.abort_every = whole();
        else if (name == "--seed") o.seed = (unsigned long)positive(name, value);
        else if (name == "--core") o.core = whole();
        else fail(name + ": no such option, or its value is missing; see --help");
    }
    if (o.pattern != "constant" && o.pattern != "lognormal" && o.pattern != "stall")
        fail("--pattern " + o.pattern + ": choose from constant, lognormal, stall");
    if (o.stall_every < 1) fail("--stall-every 0: needs 1 or more");
    return o;
}

inline void settle(const Options& o) {
    if (o.core >= 0) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(o.core, &set);
        if (sched_setaffinity(0, sizeof set, &set))
            fail("--core " + std::to_string(o.core) + ": no such core here");
    }
    if (o.realtime) {  // somebody else's time slice is 3 ms and more; without the right to, it is as it is
        const sched_param first{1};
        (void)!sched_setscheduler(0, SCHED_FIFO, &first);
    }
    rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
}

}  // namespace truth
