//! What every backend must do, told as behaviours and run on each: the fake, and QEMU with a real kernel.
//!
//! The QEMU tier needs qemu-system-x86_64 and the guest kit (`cargo xtask guest`, found through `AENV_GUEST_DIR` or in
//! `target/guest`). Without them its tests print `Skipped: <why>`.

mod agent;
mod behaviours;
mod fake_ground;
mod fake_only;
mod ground;
mod qemu_ground;
mod qemu_only;

/// Runs each behaviour on a backend, or says why not.
macro_rules! on {
    ($module:ident, $ground:ty, [$($behaviour:ident),* $(,)?]) => {
        mod $module {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $behaviour() {
                    match <$ground as crate::ground::Ground>::prepare().await {
                        Ok(ground) => crate::behaviours::$behaviour(&ground).await,
                        Err(why) => crate::ground::skipped(&why),
                    }
                }
            )*
        }
    };
}

macro_rules! on_every_backend {
    ($($behaviour:ident),* $(,)?) => {
        on!(fake, crate::fake_ground::FakeGround, [$($behaviour),*]);
        on!(qemu, crate::qemu_ground::QemuGround, [$($behaviour),*]);
    };
}

on_every_backend![
    a_booted_machine_runs_and_writes_its_console,
    a_paused_machine_stands_still_until_it_is_resumed,
    a_saved_machine_stays_resumable,
    a_running_machine_refuses_to_save_its_state,
    clones_of_one_image_have_independent_memory_and_leave_it_unchanged,
    a_clone_of_a_clone_is_possible,
    a_killed_machine_is_gone_and_says_so,
    a_paused_machine_can_be_killed,
    a_guest_that_shuts_down_is_told_from_a_crash,
    a_guest_that_panics_ends_the_machine,
    a_monitor_that_is_killed_from_outside_is_a_crash,
    an_ended_machine_refuses_everything_with_its_cause,
    a_machine_whose_handle_was_dropped_lives_and_is_adopted,
    an_adopted_machine_tells_how_it_ended,
    what_has_ended_or_is_another_is_not_adopted,
    a_snapshot_of_another_version_or_clock_is_refused_before_anything_starts,
    a_start_that_fails_leaves_nothing_behind,
    an_image_of_the_wrong_size_is_refused,
];
