//! The argument of `--max-memory`: a limit for each device.

use std::str::FromStr;

use lockstep_config::human;

use super::Device;

/// Limits on the memory of devices, in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryLimits {
    /// Limit on the memory of the whole process; `None` without one.
    pub cpu: Option<u64>,
    /// Limit on the bytes of weights on disk; `None` without one.
    pub disk: Option<u64>,
    /// Limits on GPUs, by their numbers.
    pub gpus: Vec<(usize, u64)>,
}

impl FromStr for MemoryLimits {
    type Err = String;

    /// Reads `cpu=2GiB,disk=100GiB,gpu:0=10GiB`, in any order.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut limits = Self::default();
        let mut seen = Vec::new();
        for part in text.split(',').map(str::trim) {
            let (name, size) = part
                .split_once('=')
                .ok_or_else(|| format!("`{part}` is no limit; write cpu=2GiB,disk=100GiB"))?;
            let device = Device::from_name(name.trim()).ok_or_else(|| {
                format!("`{name}` is no device; devices are cpu, disk and gpu:0, gpu:1, ...")
            })?;
            if seen.contains(&device) {
                return Err(format!("{device} has two limits"));
            }
            seen.push(device);
            let bytes = human::read_bytes(size).filter(|&bytes| bytes > 0);
            let bytes = bytes.ok_or_else(|| {
                format!("`{size}` of {device} is no size; write 2GiB, 512MB or a number of bytes")
            })?;
            match device {
                Device::Cpu => limits.cpu = Some(bytes),
                Device::Disk => limits.disk = Some(bytes),
                Device::Gpu(number) => limits.gpus.push((number, bytes)),
            }
        }
        Ok(limits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_in_any_order_and_mistakes_are_named() {
        let limits: MemoryLimits = "disk=100GiB, cpu=1.5GiB,cuda:1=10GB".parse().expect("limits");
        let expected =
            MemoryLimits { cpu: Some(3 << 29), disk: Some(100 << 30), gpus: vec![(1, 10_000_000_000)] };
        assert_eq!(limits, expected);
        for (text, part) in [
            ("2GiB", "no limit"),
            ("ram=2GiB", "`ram` is no device"),
            ("cpu=2", ""),
            ("cpu=two", "`two` of cpu"),
            ("cpu=0", "`0` of cpu"),
            ("cpu=-1GiB", "`-1GiB` of cpu"),
            ("cpu=1GiB,cpu=2GiB", "cpu has two limits"),
            ("cpu=1GiB,", "no limit"),
        ] {
            match text.parse::<MemoryLimits>() {
                Ok(limits) => assert_eq!((part, limits.cpu), ("", Some(2)), "{text}"),
                Err(error) => assert!(!part.is_empty() && error.contains(part), "{text}: {error}"),
            }
        }
    }
}
