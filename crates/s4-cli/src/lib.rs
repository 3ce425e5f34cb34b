//! The command line `s4w`, as a library, so that the Python wheel installs the same program.
//!
//! Deliberately absent: logic. Commands parse arguments, call `s4weights`, and print.
//!
//! Exit codes: 0 done; 1 the data is damaged, or a test failed; 2 wrong usage; 3 something could
//! not be found, read or written; 4 the file needs another version, program or machine; 5 something
//! that exists forbids it (the state of a store, a file that would be replaced), or another process
//! was faster; 6 there is not enough memory.
#![forbid(unsafe_code)]

mod arrays;
mod convert;
mod draft;
mod error;
mod files;
mod inspect;
mod left_out;
mod logging;
mod progress;
mod selftest;
#[cfg(all(unix, feature = "serve"))]
mod serve;
mod signals;
mod store;
mod transcode;
mod tree;
mod visible;

use std::ffi::OsString;
use std::io::Write;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{Args, Parser, Subcommand};
use s4weights::{Preset, ReadOptions, Simd, WriteOptions, redact_url};

use error::{Failure, Result};
use signals::Signals;

#[derive(Parser)]
#[command(
    name = "s4w",
    version,
    about = "Lossless compression of training checkpoints",
    after_help = "Exit codes: 0 success; 1 damaged data or a failed test; 2 wrong usage; \
                  3 not found, or not readable or writable; 4 not supported by this version or \
                  machine; 5 refused because of an existing file, the state of a store, or \
                  another process; 6 not enough memory. `serve` uses the exit codes of sysexits.h."
)]
struct Cli {
    /// Log more to standard error (-v, -vv, -vvv). By default warnings and errors are logged, with
    /// --quiet only errors; the environment variable S4_LOG sets another default: off, error, warn,
    /// info, debug or trace
    #[arg(long, short, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Compress a .safetensors file into a .s4w file (the Python wheel also compresses .pt files and
    /// torch.distributed.checkpoint folders)
    Compress {
        /// File to read
        #[arg(value_parser = place)]
        input: String,
        /// File or URL to write; by default the input path with the extension .s4w
        #[arg(value_parser = place)]
        output: Option<String>,
        /// How hard to compress: fast, balanced or small
        #[arg(long, default_value = "balanced")]
        preset: Preset,
        #[command(flatten)]
        overwrite: Overwrite,
        #[command(flatten)]
        remote: Remote,
        #[command(flatten)]
        common: Common,
    },
    /// Write the tensors of a .s4w file to a .safetensors file (the Python wheel can also write everything
    /// to a .pt file)
    Decompress {
        /// File or URL to read
        #[arg(value_parser = place)]
        input: String,
        /// File to write; by default the input path with the extension .safetensors, or .pt (Python wheel
        /// only) if a .safetensors file cannot hold everything
        #[arg(value_parser = place)]
        output: Option<String>,
        #[command(flatten)]
        overwrite: Overwrite,
        #[command(flatten)]
        trust: Trust,
        #[command(flatten)]
        remote: Remote,
        #[command(flatten)]
        common: Common,
    },
    /// Show the contents of a file without decoding values
    Inspect {
        /// File or URL
        #[arg(value_parser = place)]
        input: String,
        /// Also show the planes of each tensor, with bits per value
        #[arg(long)]
        bits: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        remote: Remote,
    },
    /// Read a whole file and check every hash and checksum
    Verify {
        /// File or URL
        #[arg(value_parser = place)]
        input: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        trust: Trust,
        #[command(flatten)]
        remote: Remote,
        #[command(flatten)]
        common: Common,
    },
    /// Manage a store of checkpoints in a folder or bucket
    #[command(subcommand)]
    Store(store::Verb),
    /// Rewrite a .s4w file with open codecs and compare the result with the original
    Transcode {
        /// File or URL to read
        #[arg(value_parser = place)]
        input: String,
        /// File or URL to write
        #[arg(value_parser = place)]
        output: String,
        /// How hard to compress: fast, balanced or small
        #[arg(long, default_value = "balanced")]
        preset: Preset,
        #[command(flatten)]
        overwrite: Overwrite,
        #[command(flatten)]
        trust: Trust,
        #[command(flatten)]
        remote: Remote,
        #[command(flatten)]
        common: Common,
    },
    /// Run a service that accepts checkpoints from trainers and makes them durable in the background (exit
    /// codes of sysexits.h)
    #[cfg(all(unix, feature = "serve"))]
    Serve(serve::Serve),
    // Without it the parser would take the word for a misspelled `store`.
    #[cfg(not(all(unix, feature = "serve")))]
    #[command(hide = true, disable_help_flag = true)]
    Serve {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
        rest: Vec<OsString>,
    },
    /// Check on this machine that every dtype is restored bit for bit
    Selftest {
        /// Corrupt one byte, to check that the self-test can fail
        #[arg(long)]
        inject_fault: bool,
        /// Also compare every CUDA device with the CPU, and fail if there is none
        #[arg(long)]
        require_gpu: bool,
        #[command(flatten)]
        common: Common,
    },
}

#[derive(Args)]
struct Common {
    /// Number of threads; by default the number of cores
    #[arg(long, value_parser = at_least_one)]
    threads: Option<usize>,
    /// Vector instructions: scalar, neon, avx2 or avx512; by default the best available
    #[arg(long)]
    simd: Option<Simd>,
    /// Do not show progress or warnings
    #[arg(long, short)]
    quiet: bool,
}

/// What concerns files that are there already.
#[derive(Args, Clone, Copy)]
struct Overwrite {
    /// Replace the output if it exists
    #[arg(long, short)]
    force: bool,
}

/// What concerns files at URLs.
#[derive(Args, Clone, Copy)]
struct Remote {
    /// Timeout of a request to an object store, including retries; by default 300, or 30 until the
    /// server has been reached once
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    timeout: Option<Duration>,
}

/// A path or URL. `-` is refused: files are read by range and appear whole, which a stream does not allow, and
/// nobody who writes `-` means a file of that name.
fn place(text: &str) -> std::result::Result<String, String> {
    match text {
        "-" => Err(
            "standard input and output are not supported: name a file (`./-` for a file named `-`)"
                .into(),
        ),
        _ => Ok(text.to_owned()),
    }
}

/// A count that is not zero: with no thread nothing is done, and the last none of a list is no list.
fn at_least_one(text: &str) -> std::result::Result<usize, String> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| "expected a number of at least 1".to_owned())
}

/// Parses a time of more than zero and at most a day.
fn seconds(text: &str) -> std::result::Result<Duration, String> {
    let time = text.parse().ok().and_then(|s| Duration::try_from_secs_f64(s).ok());
    time.filter(|t| !t.is_zero() && t.as_secs() <= 24 * 3600)
        .ok_or_else(|| "expected a number of seconds, at most a day".to_owned())
}

#[derive(Args)]
struct Trust {
    /// Trust whoever wrote the input: decode a vendor's closed codecs, on a GPU
    #[arg(long)]
    trusted: bool,
}

impl Command {
    /// Whether the command is a service, which logs its progress even without `-v`.
    fn is_service(&self) -> bool {
        #[cfg(all(unix, feature = "serve"))]
        return matches!(self, Self::Serve(_));
        #[cfg(not(all(unix, feature = "serve")))]
        false
    }

    fn is_quiet(&self) -> bool {
        match self {
            Self::Compress { common, .. }
            | Self::Decompress { common, .. }
            | Self::Verify { common, .. }
            | Self::Transcode { common, .. }
            | Self::Selftest { common, .. } => common.quiet,
            Self::Store(verb) => verb.is_quiet(),
            Self::Inspect { .. } => false,
            Self::Serve { .. } => false,
        }
    }
}

impl Common {
    fn write(&self, preset: Preset, bar: &progress::Bar) -> WriteOptions {
        WriteOptions {
            preset,
            threads: self.threads,
            simd: self.simd,
            progress: bar.callback(),
            ..WriteOptions::default()
        }
    }

    fn read(&self, trust: &Trust, bar: &progress::Bar) -> ReadOptions {
        ReadOptions {
            threads: self.threads,
            simd: self.simd,
            progress: bar.callback(),
            trusted: trust.trusted,
            ..ReadOptions::default()
        }
    }
}

impl Overwrite {
    /// Refuses to write over the input, and without `--force` over anything.
    fn check(self, input: &str, output: &str, remote: Remote) -> Result<()> {
        let options = remote.read(ReadOptions::default());
        files::check_output(Some(input), output, self.force, options)
    }
}

impl Remote {
    fn write(self, options: WriteOptions) -> WriteOptions {
        WriteOptions { deadline: self.timeout, ..options }
    }

    fn read(self, options: ReadOptions) -> ReadOptions {
        ReadOptions { deadline: self.timeout, ..options }
    }
}

/// Runs the program with its arguments, the first of which is its own name; returns its exit code.
pub fn run(args: impl IntoIterator<Item = OsString>) -> u8 {
    run_with(args, None)
}

/// As [`run`], for a process that does nothing else: the signals INT, TERM and HUP stop the command, which removes
/// half-written files. The process ends immediately on another signal, or if the command has not stopped after ten
/// seconds.
pub fn run_program(args: impl IntoIterator<Item = OsString>) -> u8 {
    run_with(args, Some(Signals::new))
}

fn run_with(
    args: impl IntoIterator<Item = OsString>,
    signals: Option<fn() -> std::io::Result<Signals>>,
) -> u8 {
    let args: Vec<OsString> = args.into_iter().collect();
    let cli = match Cli::try_parse_from(&args) {
        Ok(cli) => cli,
        Err(e) if e.kind() == ErrorKind::InvalidUtf8 => {
            visible::tell(&no_text(&args));
            return Failure::Usage(String::new()).exit_code();
        }
        Err(e) => {
            // If the terminal is closed, nobody can be told.
            let _ = e.print();
            return u8::try_from(e.exit_code()).unwrap_or(2);
        }
    };
    let quiet = cli.command.is_quiet();
    let told = cli.command.is_service() && std::env::var_os(logging::VARIABLE).is_none();
    let verbose = cli.verbose.max(u8::from(told));
    // The service handles signals itself. Without handlers, signals have their default action.
    let signals = signals.filter(|_| !cli.command.is_service()).and_then(|new| new().ok());
    let work = || logging::start(quiet, verbose).and_then(|()| execute(cli.command));
    let done = match &signals {
        Some(signals) => signals.watch(work),
        None => work(),
    };
    match (done, signals.and_then(|s| s.exit_code())) {
        (Ok(()), _) => 0,
        (Err(_), Some(code)) => {
            visible::tell("interrupted");
            code
        }
        (Err(e), None) => {
            visible::tell(&e.explain());
            e.exit_code()
        }
    }
}

/// Says which argument is not text. What may be a secret is left out: values of options, queries of URLs.
fn no_text(args: &[OsString]) -> String {
    let numbered = args.iter().enumerate().skip(1);
    let bad = numbered.filter(|(_, arg)| arg.to_str().is_none()).map(|(i, arg)| {
        let shown = arg.to_string_lossy();
        let shown = shown.split(['=', '?', '#']).next().unwrap_or_default();
        format!("argument {i} (`{shown}`)")
    });
    format!("{} is not text: UTF-8 is expected", bad.collect::<Vec<_>>().join(", "))
}

fn execute(command: Command) -> Result<()> {
    match command {
        Command::Compress { input, output, preset, overwrite, remote, common } => {
            let output = output.unwrap_or_else(|| convert::with_ending(&input, "s4w"));
            overwrite.check(&input, &output, remote)?;
            let bar = progress::Bar::new(common.quiet);
            let report =
                convert::compress(&input, (&output, overwrite.force), remote.write(common.write(preset, &bar)), &bar)?;
            drop(bar);
            say(&format!(
                "{}: {} tensors, {} -> {} bytes, ratio {:.4}, {:.2} s",
                redact_url(&output),
                report.tensors,
                report.bytes_in,
                report.bytes_out,
                report.bytes_in as f64 / report.bytes_out as f64,
                report.seconds
            ))
        }
        Command::Decompress { input, output, overwrite, trust, remote, common } => {
            let named = output.as_deref();
            let target =
                named.map_or_else(|| convert::with_ending(&input, "safetensors"), str::to_owned);
            convert::require_safetensors(&target)?;
            overwrite.check(&input, &target, remote)?;
            let bar = progress::Bar::new(common.quiet);
            let reader = files::open(&input, remote.read(common.read(&trust, &bar)))?;
            bar.expect(reader.tensors().map(|t| t.bytes).sum());
            if remote.timeout.is_some() && files::local(&input).is_none() {
                convert::refuse_pickle_in_time(&reader, &input)?;
            }
            let tensors = convert::decompress(&reader, &input, named, (&target, overwrite.force), common.quiet)?;
            drop(bar);
            say(&format!("{target}: {}", store::text::count(tensors, "tensor")))
        }
        Command::Inspect { input, bits, json, remote } => {
            let reader = files::open(&input, remote.read(ReadOptions::default()))?;
            let report = reader.inspect(bits)?;
            say(&if json { to_json(&report)? } else { inspect::table(&report) })
        }
        Command::Verify { input, json, trust, remote, common } => {
            let bar = progress::Bar::new(common.quiet);
            let reader = files::open(&input, remote.read(common.read(&trust, &bar)))?;
            bar.expect(reader.tensors().map(|t| t.bytes).sum());
            let report = reader.verify()?;
            drop(bar);
            say(&if json {
                to_json(&report)?
            } else {
                format!(
                    "{}: sound: {} tensors, {} chunks, {} bytes of values, {} hashes",
                    redact_url(&input),
                    report.tensors,
                    report.chunks,
                    report.bytes,
                    report.hashes
                )
            })
        }
        Command::Store(verb) => store::execute(verb),
        Command::Transcode { input, output, preset, overwrite, trust, remote, common } => {
            overwrite.check(&input, &output, remote)?;
            let bar = progress::Bar::new(common.quiet);
            let read = remote.read(ReadOptions { progress: None, ..common.read(&trust, &bar) });
            let write = remote.write(common.write(preset, &bar));
            let report = transcode::run(&input, (&output, overwrite.force), read, write, &bar)?;
            drop(bar);
            say(&format!(
                "{}: {} tensors, {} -> {} bytes, ratio {:.4}, compared",
                redact_url(&output),
                report.tensors,
                report.bytes_in,
                report.bytes_out,
                report.bytes_in as f64 / report.bytes_out as f64
            ))
        }
        #[cfg(all(unix, feature = "serve"))]
        Command::Serve(args) => serve::serve(args),
        #[cfg(not(all(unix, feature = "serve")))]
        Command::Serve { .. } => Err(Failure::Unsupported(
            "this build, like that of the Python wheel, has no `serve`: on Unix, use the program of the \
             crate s4-cli or the Debian package s4weights-runner (docs/runner.md)"
                .into(),
        )),
        Command::Selftest { inject_fault, require_gpu, common } => {
            if require_gpu {
                say(&selftest::gpu(inject_fault, common.simd)?)?;
                if inject_fault {
                    return Ok(()); // not noticed: success here is the failure
                }
            }
            say(&selftest::run(inject_fault, common.threads, common.simd)?)
        }
    }
}

fn to_json(value: &impl serde::Serialize) -> Result<String> {
    let text = serde_json::to_string_pretty(value).map_err(|e| Failure::Io(e.into()))?;
    Ok(visible::json(&text))
}

/// Prints to standard output, with terminal commands escaped; a reader that has closed it has read enough.
fn say(text: &str) -> Result<()> {
    match writeln!(std::io::stdout(), "{}", visible::lines(text)) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::Io(std::io::Error::new(e.kind(), format!("standard output: {e}"))))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use s4weights::{Contents, Target, Writer};

    use super::*;

    #[test]
    fn what_keeps_a_pickle_from_being_converted_is_named() {
        let url = "memory://pickles/a.s4w";
        let writer = Writer::create(Target::from(url), WriteOptions::default()).unwrap();
        let blobs = [("pickle".to_owned(), b"x".to_vec())].into();
        writer.finish(Contents { blobs, ..Contents::default() }).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let output = dir.path().join("a.safetensors").display().to_string();
        let said = |more: &[&str]| {
            let words = [&["s4w", "decompress", url, &output][..], more].concat();
            execute(Cli::try_parse_from(words).ok().unwrap().command).unwrap_err()
        };
        let error = said(&["--timeout", "5"]);
        assert!(error.exit_code() == 4 && error.to_string().contains("--timeout"), "{error}");
        assert!(said(&[]).to_string().contains("pip install"));
    }

    #[test]
    fn a_build_without_the_service_says_where_it_is() {
        let parse = |args: &[&str]| Cli::try_parse_from(args).map(|cli| execute(cli.command));
        for args in
            [&["s4w", "serve"][..], &["s4w", "serve", "--store", "x"], &["s4w", "serve", "-h"]]
        {
            // With the service, nothing is run here.
            if cfg!(not(all(unix, feature = "serve"))) {
                let said = parse(args).ok().and_then(Result::err).unwrap();
                assert_eq!(said.exit_code(), 4);
                assert!(said.to_string().contains("s4weights-runner"), "{said}");
            }
        }
        let unknown = Cli::try_parse_from(["s4w", "server"]).err().unwrap();
        assert_eq!(unknown.exit_code(), 2);
    }
}
