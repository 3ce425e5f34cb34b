// Reads and writes the files of jobs.h.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

typedef std::vector<uint8_t> Bytes;

[[noreturn]] static void fail(const std::string& what) {
  fprintf(stderr, "jobs: %s\n", what.c_str());
  exit(2);
}

// ---- files ----

class Input {
 public:
  explicit Input(const char* path) {
    FILE* f = fopen(path, "rb");
    if (!f) fail(std::string("cannot read ") + path);
    uint8_t part[1 << 16];
    for (size_t n; (n = fread(part, 1, sizeof part, f)) > 0;) all_.insert(all_.end(), part, part + n);
    fclose(f);
  }
  bool done() const { return at_ == all_.size(); }
  Bytes rest() { return bytes(all_.size() - at_); }
  Bytes bytes(size_t len) {
    if (len > all_.size() - at_) fail("the jobs end too early");
    at_ += len;
    return Bytes(all_.begin() + (at_ - len), all_.begin() + at_);
  }
  template <class T>
  T get() {
    T v;
    const Bytes b = bytes(sizeof v);
    memcpy(&v, b.data(), sizeof v);
    return v;
  }

 private:
  Bytes all_;
  size_t at_ = 0;
};

class Output {
 public:
  explicit Output(const char* path) : file_(fopen(path, "wb")) {
    if (!file_) fail(std::string("cannot write ") + path);
  }
  ~Output() {
    if (fclose(file_) != 0) fail("cannot write the answers");
  }
  void put(const void* data, size_t len) {
    if (len > 0 && fwrite(data, 1, len, file_) != len) fail("cannot write the answers");
  }

 private:
  FILE* file_;
};
