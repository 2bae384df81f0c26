//! How large a machine is.

/// Flags of commands that make machines.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(super) struct Size {
    /// Virtual CPUs [default: the template's; 2 where there is none]
    #[arg(long, value_parser = clap::value_parser!(i64).range(1..))]
    pub(super) cpu: Option<i64>,
    /// Memory in MiB [default: the template's; 512 where there is none]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(i64).range(1..))]
    pub(super) memory: Option<i64>,
    /// Disk in MiB [default: the template's; 10240 where there is none]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(i64).range(1..))]
    pub(super) disk: Option<i64>,
}
