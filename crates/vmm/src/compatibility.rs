//! Which snapshots a host can restore. A pure rule: the reason is told before anything is started.

use crate::Compatibility;

/// TSC frequencies that differ by less than one part in this many are the same: a calibration is no more exact, and a
/// guest's clock is set by the node after a restore anyway.
const TSC_TOLERANCE: u64 = 1000;

impl Compatibility {
    /// Whether a host that makes snapshots like `self` can restore one made by `maker`.
    ///
    /// # Errors
    /// The reason, naming both sides, in words for the person who asked for the restore.
    pub fn accepts(&self, maker: &Self) -> Result<(), String> {
        if self.backend != maker.backend {
            return Err(format!("it was made by {}, this host runs {}", maker.backend, self.backend));
        }
        if self.version != maker.version {
            return Err(format!(
                "it was made by {} {}, this host has {}; device state is not portable between versions: rebuild the \
                 template here or install {}",
                maker.backend, maker.version, self.version, maker.version
            ));
        }
        if self.accel != maker.accel {
            return Err(format!("it was made with {}, this host uses {}", maker.accel, self.accel));
        }
        if self.cpu != maker.cpu {
            return Err(format!(
                "its guest was shown the CPU `{}`, this host shows `{}`",
                maker.cpu, self.cpu
            ));
        }
        if self.tsc_khz.abs_diff(maker.tsc_khz) > maker.tsc_khz / TSC_TOLERANCE {
            return Err(format!(
                "its guest was told a TSC of {} kHz, this host's runs at {} kHz and the guest's clock would run wrong; \
                 rebuild the template on this kind of host",
                maker.tsc_khz, self.tsc_khz
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Backend;

    fn host() -> Compatibility {
        Compatibility {
            backend: Backend::Qemu,
            version: "10.0.2".into(),
            cpu: "Nehalem-v1".into(),
            accel: "tcg".into(),
            tsc_khz: 2_300_000,
        }
    }

    #[test]
    fn a_host_accepts_its_own_snapshots() {
        assert_eq!(host().accepts(&host()), Ok(()));
    }

    #[test]
    fn a_calibration_error_is_tolerated_and_another_frequency_is_not() {
        let near = Compatibility { tsc_khz: 2_302_300, ..host() };
        let far = Compatibility { tsc_khz: 2_302_400, ..host() };
        assert_eq!(host().accepts(&near), Ok(()));
        assert!(host().accepts(&far).unwrap_err().contains("2302400 kHz"));
        // A guest that was told none is only at home where none is told.
        let none = Compatibility { tsc_khz: 0, ..host() };
        assert!(host().accepts(&none).is_err());
        assert_eq!(none.accepts(&none), Ok(()));
    }

    #[test]
    fn every_other_difference_is_refused_by_name() {
        for (maker, word) in [
            (Compatibility { version: "8.2.2".into(), ..host() }, "8.2.2"),
            (Compatibility { cpu: "max".into(), ..host() }, "`max`"),
            (Compatibility { accel: "kvm".into(), ..host() }, "kvm"),
            (Compatibility { backend: Backend::Firecracker, ..host() }, "firecracker"),
        ] {
            let reason = host().accepts(&maker).unwrap_err();
            assert!(reason.contains(word), "{reason}");
        }
    }
}
