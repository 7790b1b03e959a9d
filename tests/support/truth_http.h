// The little of HTTP/1.1 and of the OpenAI API that the truth server speaks: what a request asks for, and the
// bytes of an answer, rendered once at the start.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

namespace truth {

// Where the value of a JSON key begins, npos if the key is not there. A quote inside a string is escaped, so
// `"key"` followed by a colon is never text.
inline size_t value_of(std::string_view json, std::string_view key) {
    const std::string quoted = '"' + std::string(key) + '"';
    for (size_t at = 0; (at = json.find(quoted, at)) != std::string_view::npos;) {
        at += quoted.size();
        size_t colon = json.find_first_not_of(" \t\r\n", at);
        if (colon == std::string_view::npos || json[colon] != ':') continue;
        return json.find_first_not_of(" \t\r\n", colon + 1);
    }
    return std::string_view::npos;
}
inline long number(std::string_view json, std::string_view key, long otherwise) {
    const size_t at = value_of(json, key);
    if (at == std::string_view::npos || (json[at] != '-' && !isdigit(json[at]))) return otherwise;
    return strtol(std::string(json.substr(at, 20)).c_str(), nullptr, 10);
}
inline bool is_true(std::string_view json, std::string_view key) {
    const size_t at = value_of(json, key);
    return at != std::string_view::npos && json.substr(at, 4) == "true";
}
inline std::string text(std::string_view json, std::string_view key) {
    const size_t at = value_of(json, key);
    if (at == std::string_view::npos || json[at] != '"') return "";
    return std::string(json.substr(at + 1, json.find('"', at + 1) - at - 1));
}

struct Ask {
    std::string id;
    int attempt = 1;
    int tokens = 16;
    long prompt_tokens = 1;
    bool chat = false, stream = false, usage = false, ids = false;
};

inline Ask read_body(std::string_view body, bool chat) {
    Ask ask;
    ask.chat = chat;
    ask.stream = is_true(body, "stream");
    ask.usage = is_true(body, "include_usage");
    ask.ids = is_true(body, "return_token_ids");
    long tokens = number(body, "max_completion_tokens", number(body, "max_tokens", 16));
    const size_t ours = value_of(body, "batchmark");
    if (ours != std::string_view::npos) {
        const std::string_view inner = body.substr(ours, body.find('}', ours) - ours);
        ask.id = text(inner, "id");
        ask.attempt = int(number(inner, "attempt", 1));
        tokens = std::min(tokens, number(inner, "stop_after", tokens));
    }
    ask.tokens = int(std::clamp(tokens, 1L, 10'000'000L));
    const size_t prompt = value_of(body, "prompt");  // of text: unknown, 1
    if (prompt != std::string_view::npos && body[prompt] == '[') {
        const size_t end = body.find(']', prompt);
        const std::string_view ids = body.substr(prompt, end - prompt);
        ask.prompt_tokens = 1 + std::count(ids.begin(), ids.end(), ',');
    }
    return ask;
}

inline std::string response(int status, const char* reason, const std::string& json) {
    return "HTTP/1.1 " + std::to_string(status) + ' ' + reason + "\r\nContent-Type: application/json\r\n" +
           "Content-Length: " + std::to_string(json.size()) + "\r\n\r\n" + json;
}
inline std::string error(int status, const char* reason, const char* message) {
    const std::string what = R"("type":"truth","code":null})";
    return response(status, reason, std::string(R"({"error":{"message":")") + message + "\"," + what + '}');
}
inline std::string chunked(const std::string& data) {
    char size[24];
    snprintf(size, sizeof size, "%zx\r\n", data.size());
    return size + data + "\r\n";
}

// Every token is the same word with the same id: what differs between answers is only when it leaves.
class Voice {
  public:
    const std::string head =
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
        "Transfer-Encoding: chunked\r\n\r\n";
    const std::string role = chunked(event(R"({"index":0,"delta":{"role":"assistant","content":""},)"
                                           R"("finish_reason":null})", true));

    Voice() {
        for (int k = 0; k < 8; ++k) tokens_[k] = chunked(token(k & 1, k & 2, k & 4));
    }
    const std::string& token_bytes(const Ask& ask, bool last) const {
        return tokens_[(ask.chat ? 1 : 0) | (ask.ids ? 2 : 0) | (last ? 4 : 0)];
    }
    std::string tail(const Ask& ask) const {
        std::string out;
        if (ask.usage)
            out = chunked("data: {" + about(ask.chat) + ",\"choices\":[]," + usage(ask) + "}\n\n");
        return out + chunked("data: [DONE]\n\n") + "0\r\n\r\n";
    }
    std::string whole(const Ask& ask) const {
        std::string words;
        for (int k = 0; k < ask.tokens; ++k) words += " word";
        const std::string choice = ask.chat ? R"("message":{"role":"assistant","content":")" + words + "\"}"
                                            : "\"text\":\"" + words + '"';
        return response(200, "OK", '{' + about(ask.chat, true) + R"(,"choices":[{"index":0,)" + choice +
                                       R"(,"finish_reason":"length"}],)" + usage(ask) + '}');
    }

  private:
    static std::string about(bool chat, bool whole = false) {
        const char* object = !chat ? "text_completion" : whole ? "chat.completion" : "chat.completion.chunk";
        return std::string(R"("id":"truth-0","created":0,"model":"truth","object":")") + object + '"';
    }
    static std::string event(const std::string& choice, bool chat) {
        return "data: {" + about(chat) + ",\"choices\":[" + choice + "]}\n\n";
    }
    static std::string token(bool chat, bool ids, bool last) {
        std::string choice = R"({"index":0,)";
        choice += chat ? R"("delta":{"content":" word"})" : R"("text":" word")";
        if (ids) choice += R"(,"token_ids":[17])";
        choice += last ? R"(,"finish_reason":"length"})" : R"(,"finish_reason":null})";
        return event(choice, chat);
    }
    static std::string usage(const Ask& ask) {
        const long prompt = ask.prompt_tokens, total = prompt + ask.tokens;
        return "\"usage\":{\"prompt_tokens\":" + std::to_string(prompt) + ",\"completion_tokens\":" +
               std::to_string(ask.tokens) + ",\"total_tokens\":" + std::to_string(total) + '}';
    }
    std::string tokens_[8];
};

}  // namespace truth
