//! A bounded run of every fuzz target; `examples/fuzz.rs` runs them for as long as one likes.
#![allow(missing_docs, unreachable_pub, dead_code, reason = "shared with the program that fuzzes for long")]

#[path = "../fuzz/mod.rs"]
mod fuzz;

use std::time::Duration;

#[test]
#[allow(clippy::print_stderr, reason = "a test's seed belongs in its output")]
fn no_mutated_file_makes_a_parser_panic() {
    let seed =
        std::env::var("FUZZ_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(rand::random);
    eprintln!("FUZZ_SEED={seed}");
    for target in &fuzz::TARGETS {
        let outcome = fuzz::fuzz(target, seed, Duration::from_millis(500));
        assert!(outcome.inputs > 10, "{} tried only {} inputs", target.name, outcome.inputs);
        assert!(outcome.finding.is_none(), "{} panicked after {} inputs", target.name, outcome.inputs);
    }
}
