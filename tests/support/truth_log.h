// What the truth server knows of every request, kept in memory and written at the end as one binary file.
// All times are CLOCK_MONOTONIC ns; 0: it did not happen. truth_server.py reads this layout.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

namespace truth {

inline int64_t clock_ns(clockid_t clock) {
    timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}
inline int64_t now_ns() { return clock_ns(CLOCK_MONOTONIC); }

enum Flag : int32_t { CHAT = 1, STREAM = 2, ABORTED = 4, CONGESTED = 8 };

struct Row {
    char id[40];          // batchmark.id of the body; empty where the body has none
    int32_t attempt;      // batchmark.attempt; 1 where the body has none
    int32_t connection;   // its number, from 0, in the order of the accepts
    int32_t tokens;       // asked for
    int32_t sent;         // how many send times follow for this row
    int32_t status;       // HTTP status of the answer
    int32_t flags;        // Flag; CONGESTED: the socket was full at least once, so its bytes left later
    int64_t accepted_ns;  // of the connection
    int64_t first_byte_ns;  // of the request was read
    int64_t arrived_ns;   // its last byte, stamped by the kernel
    int64_t received_ns;  // its last byte was read: what ttft counts from
    int64_t started_ns;   // it has a slot
    int64_t head_ns;      // right before the headers were written
    int64_t done_ns;      // right after the last bytes were written
    int64_t gone_ns;      // the client's hang-up was seen while the answer was under way
};
static_assert(sizeof(Row) == 128);

// Tokens are stamped right BEFORE the write: over loopback the kernel stamps a segment's arrival, and wakes
// its reader, inside the write, so the stamp after it may lie behind the reader's own.
struct Entry {
    Row row{};
    std::vector<int64_t> due, sent;
};

inline bool write_log(const std::string& path, const std::vector<Entry*>& entries) {
    FILE* file = fopen(path.c_str(), "wb");
    if (!file) return false;
    const uint64_t count = entries.size();
    bool good = fwrite("TRUTHLG1", 8, 1, file) == 1 && fwrite(&count, 8, 1, file) == 1;
    auto put = [&](const void* data, size_t bytes) {
        if (bytes) good = good && fwrite(data, bytes, 1, file) == 1;
    };
    for (Entry* entry : entries) {
        entry->row.sent = int32_t(entry->sent.size());
        put(&entry->row, sizeof(Row));
    }
    for (Entry* entry : entries) put(entry->due.data(), entry->sent.size() * 8);
    for (Entry* entry : entries) put(entry->sent.data(), entry->sent.size() * 8);
    return fclose(file) == 0 && good;
}

}  // namespace truth
