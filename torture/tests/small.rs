//! The attacks in a small version, for every run of the tests: a minute in all. Those that need
//! servers take the ones that `cargo xtask test` starts and names in the environment.

use std::process::Command;

/// Runs an attack; what it printed is in the message if a promise was broken.
fn withstand(attack: &str, rounds: u32) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_s4-torture"));
    command.args([attack, "--rounds", &rounds.to_string(), "--seconds", "60"]);
    let output = command.output().expect("the program starts");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    println!("{said}");
}

#[test]
fn kills() {
    withstand("kills", 12);
}

#[test]
fn a_faulty_network() {
    withstand("proxy", 80);
}

#[test]
fn creation_through_a_faulty_network() {
    withstand("creation", 16);
}

#[test]
fn servers_that_lie() {
    withstand("liars", 1);
}

#[test]
fn places_that_vanish() {
    withstand("vanish", 1);
}
