// An OpenAI-compatible streaming server of known truth: every token leaves at an absolute deadline, and when
// it really left is on record. One thread, epoll, no dependencies; Linux. --help lists the options.
//
// Token 0 is due ttft after the request was received (or got its slot), token k+1 its gap after token k's
// *deadline*: a late token delays no other. Standard output gets one JSON line with the port; SIGTERM, SIGINT
// and (with --exit-with-stdin) the end of standard input write the log and end the server.

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <deque>
#include <memory>
#include <queue>
#include <random>
#include <unordered_map>

#include "truth_http.h"
#include "truth_log.h"
#include "truth_options.h"

namespace truth {

struct Connection;

struct Stream {  // an answer that is waiting or under way
    Entry* entry;
    Ask ask;
    std::mt19937_64 random;
    int64_t due = 0;
    int next = 0;           // the token that is due
    int abort_after = -1;   // -1: never
    bool head_sent = false, in_slot = false;
};

struct Connection {
    int fd, number;
    int64_t accepted_ns, first_byte_ns = 0;
    std::string in, out;  // not yet parsed; not yet taken by the socket
    std::unique_ptr<Stream> stream;
};

class Server {
  public:
    explicit Server(Options options) : options_(std::move(options)) {
        ttft_ns_ = int64_t(options_.ttft_ms * 1e6);
        gap_ns_ = int64_t(options_.gap_ms * 1e6);
        stall_ns_ = int64_t(options_.stall_ms * 1e6);
        lognormal_ = options_.pattern == "lognormal";
        stalls_ = options_.pattern == "stall";
        open();
    }

    void serve() {
        epoll_event events[256];
        while (!stopping_) {
            const bool more = emit_due();
            const int n = epoll_wait(epoll_, events, 256, more ? 0 : -1);
            for (int k = 0; k < n; ++k) {
                const int fd = events[k].data.fd;
                if (fd == listener_) accept_all();
                else if (fd == signals_) stopping_ = true;
                else if (fd == STDIN_FILENO) stopping_ = stopping_ || stdin_ended();
                else if (fd != timer_) serve_connection(fd, events[k].events);
            }
            dead_.clear();
        }
        if (!options_.log.empty() && !write_log(options_.log, log_)) fail("cannot write " + options_.log);
    }

  private:
    struct Due {
        int64_t at;
        int connection;  // its number: a connection that has closed is not found any more
        bool operator>(const Due& other) const { return at > other.at; }
    };
    static constexpr int BURST = 128;  // tokens between two looks at the sockets: receipts must not wait long

    void open() {
        epoll_ = epoll_create1(EPOLL_CLOEXEC);
        listener_ = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        const int on = 1;
        setsockopt(listener_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        setsockopt(listener_, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof on);  // inherited by what it accepts
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_port = htons(uint16_t(options_.port));
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        if (bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof address) ||
            listen(listener_, 4096))
            fail("--port " + std::to_string(options_.port) + ": " + strerror(errno));
        socklen_t size = sizeof address;
        getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
        timer_ = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
        sigset_t set;
        sigemptyset(&set);
        sigaddset(&set, SIGTERM);
        sigaddset(&set, SIGINT);
        sigprocmask(SIG_BLOCK, &set, nullptr);
        signals_ = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
        watch(listener_, EPOLLIN);
        watch(timer_, EPOLLIN | EPOLLET);
        watch(signals_, EPOLLIN);
        if (options_.exit_with_stdin) {
            fcntl(STDIN_FILENO, F_SETFL, O_NONBLOCK);
            watch(STDIN_FILENO, EPOLLIN);
        }
        printf("{\"event\":\"ready\",\"port\":%d,\"pid\":%d}\n", ntohs(address.sin_port), getpid());
        fflush(stdout);
    }

    void watch(int fd, uint32_t events, int how = EPOLL_CTL_ADD) {
        epoll_event event{};
        event.events = events;
        event.data.fd = fd;
        if (epoll_ctl(epoll_, how, fd, &event)) fail(std::string("epoll_ctl: ") + strerror(errno));
    }

    static bool stdin_ended() {
        char scratch[256];
        const ssize_t n = read(STDIN_FILENO, scratch, sizeof scratch);
        return n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
    }

    // Send what is due, at most BURST tokens; true: more is due. Else the timer rings at the next deadline.
    bool emit_due() {
        for (int k = 0; k < BURST && !heap_.empty(); ++k) {
            const Due due = heap_.top();
            if (due.at > now_ns()) {
                if (due.at != armed_) {
                    itimerspec when{};
                    when.it_value = {due.at / 1'000'000'000, due.at % 1'000'000'000};
                    timerfd_settime(timer_, TFD_TIMER_ABSTIME, &when, nullptr);
                    armed_ = due.at;
                }
                return false;
            }
            heap_.pop();
            const auto found = by_number_.find(due.connection);
            if (found != by_number_.end() && found->second->stream && found->second->stream->due == due.at)
                emit(*found->second);
        }
        return !heap_.empty();
    }

    void emit(Connection& connection) {
        Stream& stream = *connection.stream;
        Entry& entry = *stream.entry;
        if (stream.next == stream.abort_after) {
            entry.row.flags |= ABORTED;
            entry.row.done_ns = now_ns();
            const linger hard{1, 0};
            setsockopt(connection.fd, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
            close_connection(connection);
            return;
        }
        const bool last = !stream.ask.stream || stream.next + 1 == stream.ask.tokens;
        const std::string* bytes = &voice_.token_bytes(stream.ask, last);
        if (!stream.ask.stream) {
            scratch_ = voice_.whole(stream.ask);
            bytes = &scratch_;
        } else if (last || stream.next == 0) {  // what belongs to the first and the last token goes along
            scratch_.clear();
            if (!stream.head_sent) scratch_ += voice_.head;
            if (stream.next == 0 && stream.ask.chat) scratch_ += voice_.role;
            scratch_ += *bytes;
            if (last) scratch_ += voice_.tail(stream.ask);
            bytes = &scratch_;
        }
        entry.due.push_back(stream.due);
        entry.sent.push_back(now_ns());
        if (!stream.head_sent) entry.row.head_ns = entry.sent.back();
        stream.head_sent = true;
        put(connection, *bytes);
        if (connection.fd < 0) return;  // it broke, and close_connection has been here
        if (last) {
            entry.row.done_ns = now_ns();
            finish(connection);
            return;
        }
        stream.due += gap(stream);
        ++stream.next;
        heap_.push({stream.due, connection.number});
    }

    int64_t gap(Stream& stream) {
        if (lognormal_) {
            std::lognormal_distribution<double> draw(-options_.sigma * options_.sigma / 2, options_.sigma);
            return int64_t(double(gap_ns_) * draw(stream.random));
        }
        const bool longer = stalls_ && (stream.next + 1) % options_.stall_every == 0;
        return gap_ns_ + (longer ? stall_ns_ : 0);
    }

    void put(Connection& connection, const std::string& bytes) {
        if (connection.out.empty()) {
            const ssize_t n = send(connection.fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
            if (n == ssize_t(bytes.size())) return;
            if (n < 0 && errno != EAGAIN) {
                hang_up(connection);
                return;
            }
            connection.out.assign(bytes, n < 0 ? 0 : size_t(n));
            watch(connection.fd, EPOLLIN | EPOLLRDHUP | EPOLLOUT, EPOLL_CTL_MOD);
        } else {
            connection.out += bytes;
        }
        if (connection.stream) connection.stream->entry->row.flags |= CONGESTED;
    }

    void flush(Connection& connection) {
        const ssize_t n =
            send(connection.fd, connection.out.data(), connection.out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0) connection.out.erase(0, size_t(n));
        if (n < 0 && errno != EAGAIN) return hang_up(connection);
        if (connection.out.empty()) watch(connection.fd, EPOLLIN | EPOLLRDHUP, EPOLL_CTL_MOD);
    }

    void accept_all() {
        for (;;) {
            const int fd = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
            if (fd < 0) return;
            const int on = 1;
            setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
            auto connection = std::make_unique<Connection>();
            connection->fd = fd;
            connection->number = connections_++;
            connection->accepted_ns = now_ns();
            by_number_[connection->number] = connection.get();
            by_fd_[fd] = std::move(connection);
            watch(fd, EPOLLIN | EPOLLRDHUP);
        }
    }

    void serve_connection(int fd, uint32_t events) {
        const auto found = by_fd_.find(fd);
        if (found == by_fd_.end()) return;
        Connection& connection = *found->second;
        if (events & EPOLLOUT) flush(connection);
        if (connection.fd >= 0 && events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) receive(connection);
    }

    void receive(Connection& connection) {
        char buffer[65536];
        alignas(cmsghdr) char control[256];
        for (;;) {
            iovec piece{buffer, sizeof buffer};
            msghdr message{};
            message.msg_iov = &piece;
            message.msg_iovlen = 1;
            message.msg_control = control;
            message.msg_controllen = sizeof control;
            const ssize_t n = recvmsg(connection.fd, &message, 0);
            if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
            if (n <= 0) return hang_up(connection);
            const int64_t read_ns = now_ns();
            if (connection.in.empty()) connection.first_byte_ns = read_ns;
            connection.in.append(buffer, size_t(n));
            const int64_t arrived_ns = kernel_stamp(message, read_ns);
            while (connection.fd >= 0 && !connection.stream && parse(connection, arrived_ns, read_ns)) {
            }
            if (connection.fd < 0 || size_t(n) < sizeof buffer) return;
        }
    }

    // SCM_TIMESTAMPNS is CLOCK_REALTIME: brought to CLOCK_MONOTONIC by the two clocks' distance right now.
    static int64_t kernel_stamp(msghdr& message, int64_t otherwise) {
        for (cmsghdr* c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c)) {
            if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_TIMESTAMPNS) continue;
            timespec stamp;
            memcpy(&stamp, CMSG_DATA(c), sizeof stamp);
            const int64_t apart = clock_ns(CLOCK_REALTIME) - now_ns();
            return stamp.tv_sec * 1'000'000'000LL + stamp.tv_nsec - apart;
        }
        return otherwise;
    }

    // Take one whole request off the input and begin its answer; false if there is none yet.
    bool parse(Connection& connection, int64_t arrived_ns, int64_t received_ns) {
        const std::string_view in = connection.in;
        const size_t head_end = in.find("\r\n\r\n");
        if (head_end == std::string_view::npos) return false;
        std::string head(in.substr(0, head_end + 2));
        std::transform(head.begin(), head.end(), head.begin(), [](unsigned char c) { return tolower(c); });
        const size_t length_at = head.find("\r\ncontent-length:");
        const size_t length =
            length_at == std::string::npos ? 0 : strtoul(head.c_str() + length_at + 17, nullptr, 10);
        if (in.size() < head_end + 4 + length) return false;
        auto starts = [&](const char* text) { return head.rfind(text, 0) == 0; };
        const bool chat = starts("post /v1/chat/completions ");
        if (head.find("\r\nexpect:") != std::string::npos ||
            head.find("\r\ntransfer-encoding:") != std::string::npos) {
            put(connection, error(400, "Bad Request", "send a Content-Length and no Expect"));
        } else if (chat || starts("post /v1/completions ")) {
            const Ask ask = read_body(in.substr(head_end + 4, length), chat);
            begin(connection, ask, arrived_ns, received_ns);
        } else if (starts("get /v1/models ")) {
            const char* models = R"({"object":"list","data":[{"id":"truth","object":"model"}]})";
            put(connection, response(200, "OK", models));
        } else if (starts("get /health ")) {
            put(connection, response(200, "OK", R"({"status":"ok"})"));
        } else {
            put(connection, error(404, "Not Found", "no such path"));
        }
        connection.in.erase(0, head_end + 4 + length);
        connection.first_byte_ns = connection.in.empty() ? 0 : received_ns;
        return true;
    }

    void begin(Connection& connection, const Ask& ask, int64_t arrived_ns, int64_t received_ns) {
        entries_.emplace_back();
        Entry* entry = &entries_.back();
        log_.push_back(entry);
        const size_t number = log_.size();
        Row& row = entry->row;
        snprintf(row.id, sizeof row.id, "%s", ask.id.c_str());
        row.attempt = ask.attempt;
        row.connection = connection.number;
        row.tokens = ask.tokens;
        row.flags = (ask.chat ? CHAT : 0) | (ask.stream ? STREAM : 0);
        row.accepted_ns = connection.accepted_ns;
        row.first_byte_ns = connection.first_byte_ns;
        row.arrived_ns = arrived_ns;
        row.received_ns = received_ns;
        row.status = 200;
        if (options_.error_every && number % options_.error_every == 0) {
            row.status = 500;
            row.head_ns = now_ns();
            put(connection, error(500, "Internal Server Error", "every so often"));
            row.done_ns = now_ns();
            return;
        }
        const size_t expected = size_t(ask.stream ? std::min(ask.tokens, 65536) : 1);
        entry->due.reserve(expected);
        entry->sent.reserve(expected);
        auto stream = std::make_unique<Stream>();
        stream->entry = entry;
        stream->ask = ask;
        if (lognormal_) stream->random.seed(options_.seed * 1'000'003 + number);
        if (options_.abort_every && number % options_.abort_every == 0)
            stream->abort_after = stream->ask.tokens / 2;
        connection.stream = std::move(stream);
        if (options_.slots && busy_ >= options_.slots) queue_.push_back(connection.number);
        else start(connection, received_ns);
    }

    void start(Connection& connection, int64_t at_ns) {
        Stream& stream = *connection.stream;
        stream.in_slot = true;
        ++busy_;
        stream.entry->row.started_ns = at_ns;
        stream.due = at_ns + ttft_ns_;
        if (!stream.ask.stream) stream.due += gap_ns_ * (stream.ask.tokens - 1);
        heap_.push({stream.due, connection.number});
        if (!options_.late_head && stream.ask.stream) {
            stream.head_sent = true;
            stream.entry->row.head_ns = now_ns();
            put(connection, voice_.head);
        }
    }

    // The answer is over. Its slot passes to the next in line at the moment at which it was due to end.
    void finish(Connection& connection) {
        const auto stream = std::move(connection.stream);
        const int64_t over_ns = stream->entry->row.gone_ns ? stream->entry->row.gone_ns : stream->due;
        if (stream->in_slot) --busy_;
        while (stream->in_slot && !queue_.empty()) {
            const auto found = by_number_.find(queue_.front());
            queue_.pop_front();
            if (found == by_number_.end() || !found->second->stream) continue;  // it left while it waited
            start(*found->second, over_ns);
            break;
        }
        if (connection.fd >= 0 && !connection.in.empty()) {  // a request that came before its time
            const int64_t now = now_ns();
            while (!connection.stream && parse(connection, now, now)) {
            }
        }
    }

    void hang_up(Connection& connection) {
        if (connection.stream) connection.stream->entry->row.gone_ns = now_ns();
        close_connection(connection);
    }

    void close_connection(Connection& connection) {
        if (connection.fd < 0) return;
        const auto found = by_fd_.find(connection.fd);
        dead_.push_back(std::move(found->second));  // somebody up the stack still looks at it
        by_fd_.erase(found);
        by_number_.erase(connection.number);
        close(connection.fd);
        connection.fd = -1;
        if (connection.stream) finish(connection);
    }

    Options options_;
    Voice voice_;
    int64_t ttft_ns_, gap_ns_, stall_ns_, armed_ = 0;
    bool lognormal_, stalls_, stopping_ = false;
    int epoll_ = -1, listener_ = -1, timer_ = -1, signals_ = -1, connections_ = 0, busy_ = 0;
    std::string scratch_;
    std::deque<Entry> entries_;
    std::vector<Entry*> log_;
    std::vector<std::unique_ptr<Connection>> dead_;
    std::unordered_map<int, std::unique_ptr<Connection>> by_fd_;
    std::unordered_map<int, Connection*> by_number_;
    std::priority_queue<Due, std::vector<Due>, std::greater<Due>> heap_;
    std::deque<int> queue_;
};

}  // namespace truth

int main(int argc, char** argv) {
    truth::Options options = truth::read_options(argc, argv);
    truth::settle(options);
    truth::Server(std::move(options)).serve();
    return 0;
}
