# An image for g6 and g6e: Ubuntu 22.04, a pinned NVIDIA driver, the wheel, the runner and nvCOMP. The order is the
# point: what is snapshotted is what the gate has seen, on the kernel and the driver that it was seen on. Build with
#   packer init . && packer build -var base_ami=... -var cfn_bootstrap_sha256=... \
#     -var package=../../target/debian/s4weights.deb -var wheel=... -var commit=... .

packer {
  required_plugins {
    amazon = {
      version = "= 1.8.0"
      source  = "github.com/hashicorp/amazon"
    }
  }
}

variable "region" {
  type    = string
  default = "us-east-1"
}

variable "instance_type" {
  type    = string
  default = "g6.xlarge"
}

variable "base_ami" {
  type        = string
  description = "Canonical's image to start from, in this region. It has no default, so that two builds start from the same image. To find the newest one: aws ssm get-parameter --name /aws/service/canonical/ubuntu/server/22.04/stable/current/amd64/hvm/ebs-gp2/ami-id --query Parameter.Value --output text"

  validation {
    condition     = can(regex("^ami-[0-9a-f]{8,17}$", var.base_ami))
    error_message = "The base image must be an id such as ami-0123456789abcdef0."
  }
}

variable "driver" {
  type        = string
  default     = "580"
  description = "Branch of the NVIDIA driver, from Ubuntu's own signed modules"
}

variable "package" {
  type        = string
  description = "The runner's .deb"
}

variable "wheel" {
  type        = string
  description = "The Python wheel"
}

variable "commit" {
  type        = string
  description = "Commit that both were built from"
}

variable "cfn_bootstrap" {
  type        = string
  default     = "2.0-39"
  description = "Version of aws-cfn-bootstrap-py3, which provides cfn-signal; not latest"

  validation {
    condition     = can(regex("^[0-9]+\\.[0-9]+-[0-9]+$", var.cfn_bootstrap))
    error_message = "The version of aws-cfn-bootstrap-py3 must be a number such as 2.0-39."
  }
}

variable "cfn_bootstrap_sha256" {
  type        = string
  description = "SHA-256 of that version's archive. AWS does not publish it: download aws-cfn-bootstrap-py3-<version>.tar.gz twice, from different networks, and compare the results of sha256sum"

  validation {
    condition     = can(regex("^[0-9a-f]{64}$", var.cfn_bootstrap_sha256))
    error_message = "The hash of the archive must be 64 hexadecimal digits, in lower case."
  }
}

variable "encrypt_boot" {
  type        = bool
  default     = false
  description = "Whether to encrypt the image's snapshot. Off by default: AWS Marketplace rejects encrypted snapshots, and an image that is encrypted with the default EBS key cannot be shared. The image contains no secrets, and the stack's launch template encrypts volumes when they are created. (If EBS encryption by default is on, EC2 encrypts the snapshot anyway.)"
}

source "amazon-ebs" "runner" {
  region        = var.region
  instance_type = var.instance_type
  ssh_username  = "ubuntu"
  ami_name      = "s4weights-runner-ubuntu-22.04-{{timestamp}}"
  encrypt_boot  = var.encrypt_boot
  imds_support  = "v2.0"

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  # One image, and only if it is Canonical's Ubuntu 22.04.
  source_ami_filter {
    owners = ["099720109477"]
    filters = {
      image-id            = var.base_ami
      name                = "ubuntu/images/hvm-ssd/ubuntu-jammy-22.04-amd64-server-*"
      root-device-type    = "ebs"
      virtualization-type = "hvm"
    }
  }

  launch_block_device_mappings {
    device_name           = "/dev/sda1"
    volume_size           = 50
    volume_type           = "gp3"
    delete_on_termination = true
  }

  tags = {
    Name   = "s4weights-runner"
    Commit = var.commit
    Base   = var.base_ami
  }
}

build {
  sources = ["source.amazon-ebs.runner"]

  # 1. The driver, pinned.
  provisioner "shell" {
    script           = "${path.root}/install-driver.sh"
    environment_vars = ["DRIVER=${var.driver}"]
    execute_command  = "sudo env {{ .Vars }} bash {{ .Path }}"
  }

  # 2. Its kernel runs from here on.
  provisioner "shell" {
    inline            = ["sudo systemctl reboot"]
    expect_disconnect = true
  }

  # 3. The runner, the wheel, nvCOMP and CloudFormation's signal.
  provisioner "file" {
    source       = var.package
    destination  = "/tmp/s4weights.deb"
    pause_before = "30s"
  }

  provisioner "file" {
    source      = var.wheel
    destination = "/tmp/"
  }

  provisioner "file" {
    sources     = ["${path.root}/requirements.txt", "${path.root}/requirements-cfn.txt"]
    destination = "/tmp/"
  }

  provisioner "shell" {
    script           = "${path.root}/install-runner.sh"
    environment_vars = ["CFN_BOOTSTRAP=${var.cfn_bootstrap}", "CFN_BOOTSTRAP_SHA256=${var.cfn_bootstrap_sha256}"]
    execute_command  = "sudo env {{ .Vars }} bash {{ .Path }}"
  }

  # 4. The gate: if it fails there is no image.
  provisioner "shell" {
    script           = "${path.root}/gate.sh"
    environment_vars = ["COMMIT=${var.commit}"]
    execute_command  = "sudo env {{ .Vars }} bash {{ .Path }}"
  }

  # 5. Nothing of this machine stays in the image.
  provisioner "shell" {
    script          = "${path.root}/scrub.sh"
    execute_command = "sudo bash {{ .Path }}"
  }

  post-processor "manifest" {
    output = "manifest.json"
  }
}
