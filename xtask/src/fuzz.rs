//! `cargo xtask fuzz`: libFuzzer on the targets of `fuzz/`, with a stable compiler.
//!
//! The runtime comes with the crate `libfuzzer-sys`; every release of the compiler has the flags
//! that make it count branches. Nothing is installed.

mod report;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use crate::error::{Error, Result};
use crate::proc;
use report::Outcome;

const FOLDER: &str = "fuzz";

/// Makes the compiler count branches, for libFuzzer to see. (Showing it comparisons, too, would
/// take two thirds of the time and help little: inputs are lists of choices, or start from seeds.)
const COVERAGE: &str = "-Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table";

/// The most memory, in MB, and time, in seconds, that one input may take.
const RSS_MB: u32 = 2048;
const SECONDS: u32 = 20;

/// The targets that read whole files or stores, and the emulated kernels.
const WHOLE: [&str; 6] = ["chain", "gpu", "reader", "safetensors", "store_log", "store_views"];

/// Longest inputs of the targets whose inputs are lists of choices: longer ones would only be slow.
/// All other targets take [`MAX_LEN`].
const SHORT: [(&str, u32); 5] =
    [("chain", 200), ("reader", 200), ("store_log", 600), ("gpu", 3000), ("planes", 1000)];
const MAX_LEN: u32 = 8192;

/// The target whose code is C++, and the flags that give it AddressSanitizer.
const KERNELS: &str = "gpu";
const KERNELS_ASAN: &str = "-fsanitize=address,undefined -fno-sanitize-recover=undefined";
/// Stacks are switched by hand, which the sanitizer need not follow.
const ASAN_OPTIONS: &str =
    "detect_stack_use_after_return=0:detect_leaks=0:handle_abort=0:handle_segv=0";

/// What to run, and for how long.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Targets to run; by default all
    targets: Vec<String>,
    /// Number of executions of each target
    #[arg(long, default_value_t = 100_000)]
    runs: u64,
    /// Run as many executions as a release needs: ten million of targets that read parts, one million of
    /// those that read whole files and stores
    #[arg(long, conflicts_with = "runs")]
    release: bool,
    /// Number of targets to run in parallel
    #[arg(long, default_value_t = 1)]
    jobs: usize,
    /// Time limit of each target, in minutes
    #[arg(long)]
    minutes: Option<f64>,
    /// Build with AddressSanitizer, which detects invalid accesses of `unsafe` code; half as fast
    #[arg(long)]
    asan: bool,
    /// Only build the targets
    #[arg(long)]
    build: bool,
}

/// Builds the targets, runs them one after the other, and prints a table.
///
/// # Errors
/// If a build fails, a target is not known, or an input crashed one.
pub(crate) fn run(root: &Path, args: &Args) -> Result<String> {
    let known = targets(root)?;
    if let Some(unknown) = args.targets.iter().find(|t| !known.contains(t)) {
        let all = known.join(", ");
        return Err(Error::new(format!("unknown target {unknown}; the targets are {all}")));
    }
    let wanted = if args.targets.is_empty() { &known } else { &args.targets };
    // The kernels get their sanitizer from their own compiler, so their target is built without.
    let with_asan = |target: &String| args.asan && target != KERNELS;
    for asan in [true, false] {
        if wanted.iter().any(|t| with_asan(t) == asan) {
            build(root, asan)?;
        }
    }
    if args.build {
        return Ok(format!("{} programs", known.len()));
    }
    let outcomes = side_by_side(wanted, args.jobs, |target| {
        fuzz(root, &programs(root, with_asan(target))?, target, args)
    })?;
    let crashes: Vec<_> = outcomes.iter().flat_map(|o| &o.crashes).collect();
    for crash in &crashes {
        println!("crash: {}", crash.display());
    }
    let executions: u64 = outcomes.iter().map(|o| o.executions).sum();
    match (crashes.len(), outcomes.iter().find(|o| o.failed)) {
        (0, None) => Ok(format!("{executions} executions of {} targets", outcomes.len())),
        (0, Some(o)) => {
            Err(Error::new(format!("target {} ended early: see {}", o.target, o.log.display())))
        }
        (n, _) => Err(Error::new(format!(
            "{n} input(s) crashed a target, listed above: fix the fault, and keep the input in \
             {FOLDER}/regressions"
        ))),
    }
}

/// Runs targets, `jobs` of them at a time, and prints the table so far when one is done.
fn side_by_side(
    targets: &[String],
    jobs: usize,
    run: impl Fn(&String) -> Result<Outcome> + Sync,
) -> Result<Vec<Outcome>> {
    let waiting = Mutex::new(targets.iter());
    let done = Mutex::new(Ok(vec![]));
    let work = || loop {
        let next = waiting.lock().unwrap_or_else(|e| e.into_inner()).next();
        let Some(target) = next else { return };
        let outcome = run(target);
        let mut done = done.lock().unwrap_or_else(|e| e.into_inner());
        match (outcome, &mut *done) {
            (Ok(outcome), Ok(all)) => {
                all.push(outcome);
                print!("{}", report::table(all));
            }
            (Err(e), _) => *done = Err(e),
            _ => {}
        }
    };
    std::thread::scope(|scope| {
        (0..jobs.max(1)).for_each(|_| _ = scope.spawn(work));
    });
    done.into_inner().unwrap_or_else(|e| e.into_inner())
}

/// The targets: programs of the fuzzing package.
fn targets(root: &Path) -> Result<Vec<String>> {
    let folder = root.join(FOLDER).join("fuzz_targets");
    let entries = fs::read_dir(&folder).map_err(|e| Error::at(&folder, &e))?;
    let stem = |path: PathBuf| Some(path.file_stem()?.to_str()?.to_owned());
    let mut all: Vec<_> = entries.filter_map(|e| stem(e.ok()?.path())).collect();
    all.sort();
    Ok(all)
}

/// Where cargo builds the targets.
fn target_folder(root: &Path, asan: bool) -> PathBuf {
    root.join("target").join(if asan { "fuzz-asan" } else { "fuzz" })
}

/// The folder of the programs.
fn programs(root: &Path, asan: bool) -> Result<PathBuf> {
    Ok(target_folder(root, asan).join(host(root)?).join("release"))
}

/// Builds every target.
fn build(root: &Path, asan: bool) -> Result<()> {
    let host = host(root)?;
    let target = target_folder(root, asan);
    let mut build = proc::cargo(root);
    build.args(["build", "--release", "--locked", "--manifest-path", "fuzz/Cargo.toml"]);
    // If a target is named, the flags do not apply to build scripts and macros.
    build.args(["--target", &host]).arg("--target-dir").arg(&target);
    build.env(
        "RUSTFLAGS",
        if asan { format!("{COVERAGE} -Zsanitizer=address") } else { COVERAGE.into() },
    );
    if asan {
        // The sanitizer comes with every compiler, but its flag is not stable yet.
        build.env("RUSTC_BOOTSTRAP", "1");
    }
    proc::run(&mut build)
}

/// The machine that the compiler runs on, as compilers name it.
fn host(root: &Path) -> Result<String> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let said = proc::output(proc::command(root, rustc).arg("-vV"))?;
    let host = said.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).ok_or_else(|| Error::new("rustc -vV prints no host"))
}

/// Runs one target until it is done or crashes.
fn fuzz(root: &Path, programs: &Path, target: &str, args: &Args) -> Result<Outcome> {
    let folder = |kind: &str| -> Result<PathBuf> {
        let folder = root.join(FOLDER).join(kind).join(target);
        fs::create_dir_all(&folder).map_err(|e| Error::at(&folder, &e))?;
        Ok(folder)
    };
    let (corpus, artifacts) = (folder("corpus")?, folder("artifacts")?);
    let before = report::crashes(&artifacts)?;
    let max_len = SHORT.iter().find(|s| s.0 == target).map_or(MAX_LEN, |s| s.1);
    let log = programs.join(format!("{target}.log"));
    let mut fuzzer = program(root, programs, target)?;
    if args.asan && target == KERNELS {
        let library = proc::output(proc::command(root, "g++").arg("-print-file-name=libasan.so"))?;
        fuzzer.env("LD_PRELOAD", library.trim()).env("S4_FUZZ_CXXFLAGS", KERNELS_ASAN);
        fuzzer.env("ASAN_OPTIONS", ASAN_OPTIONS);
    }
    let whole = WHOLE.contains(&target);
    let runs = match args.release {
        true if whole => 1_000_000,
        true => 10_000_000,
        false => args.runs,
    };
    fuzzer.arg(format!("-runs={runs}"));
    if let Some(minutes) = args.minutes {
        fuzzer.arg(format!("-max_total_time={}", (minutes * 60.0).ceil()));
    }
    fuzzer.arg(format!("-max_len={max_len}")).arg(format!("-rss_limit_mb={RSS_MB}"));
    fuzzer.arg(format!("-timeout={SECONDS}")).arg("-print_final_stats=1");
    // Closes what a target prints; for the target that is a command line, also its errors.
    fuzzer.arg(format!("-close_fd_mask={}", if target == "safetensors" { 3 } else { 1 }));
    fuzzer.arg(format!("-artifact_prefix={}/", artifacts.display()));
    fuzzer.arg(corpus);
    // Kept inputs run first.
    for kept in ["seeds", "regressions"] {
        let folder = root.join(FOLDER).join(kept).join(target);
        if folder.is_dir() {
            fuzzer.arg(folder);
        }
    }
    let file = fs::File::create(&log).map_err(|e| Error::at(&log, &e))?;
    let also = file.try_clone().map_err(|e| Error::at(&log, &e))?;
    println!("\n$ {target}, up to {runs} executions; its log: {}", log.display());
    let status = fuzzer.stdout(file).stderr(also).status();
    let status = status.map_err(|e| Error::new(format!("cannot start {target}: {e}")))?;
    let text =
        String::from_utf8_lossy(&fs::read(&log).map_err(|e| Error::at(&log, &e))?).into_owned();
    let mut crashes = report::crashes(&artifacts)?;
    crashes.retain(|c| !before.contains(c));
    Ok(report::outcome(target, log, &text, crashes, !status.success()))
}

/// The program of a target.
fn program(root: &Path, programs: &Path, target: &str) -> Result<Command> {
    let program = programs.join(target);
    if !program.is_file() {
        return Err(Error::new(format!("{} is missing", program.display())));
    }
    Ok(proc::command(root, program))
}
